import numpy as np
from learner_fakes import Turn, make_rollout

from learners.controls import shuffle_rewards


def test_rewards_move_inside_their_group_only() -> None:
    turns = [Turn([1], [2])]
    first = [make_rollout(turns, index / 10, group="a", index=index) for index in range(8)]
    second = [make_rollout(turns, 0.9, group="b"), make_rollout([], None, group="b", index=1)]
    shuffled = shuffle_rewards([*first, *second], np.random.default_rng(0))
    assert [rollout.id for rollout in shuffled] == [rollout.id for rollout in [*first, *second]]
    rewards = [rollout.reward for rollout in shuffled[:8]]
    assert rewards != sorted(rewards) == [rollout.reward for rollout in first]
    assert [(rollout.reward, rollout.graded) for rollout in shuffled[8:]] == [(0.9, True), (0.0, False)]
    assert first[3].reward == 0.3


def test_groups_of_one_are_shuffled_as_one_batch() -> None:
    rollouts = [make_rollout([Turn([1], [2])], index / 8, group=f"g{index}") for index in range(8)]
    shuffled = shuffle_rewards(rollouts, np.random.default_rng(0), within_groups=False)
    rewards = [rollout.reward for rollout in shuffled]
    assert sorted(rewards) == [index / 8 for index in range(8)]
    assert rewards != sorted(rewards)
    assert [rollout.id for rollout in shuffled] == [rollout.id for rollout in rollouts]
