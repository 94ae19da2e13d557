import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learner_fakes import Turn, make_rollout

from clawgym_env.engine.base import SamplingParams
from clawgym_env.trace.prefix_tree import Selection, TokenRow
from learners.rows import TrainingRow, num_trained, pack, trained_rows, training_rows


def plain_row(length: int, trained: list[int], *, rollout: int = 0, weight: float = 1.0) -> TrainingRow:
    mask = np.zeros(length, dtype=bool)
    mask[trained] = True
    tokens = TokenRow(
        token_ids=np.arange(length, dtype=np.int32) + 100 * rollout,
        loss_mask=mask,
        logprobs=np.full(length, -0.5, dtype=np.float32),
        policy_versions=np.zeros(length, dtype=np.int32),
        temperatures=np.full(length, 0.7, dtype=np.float32),
        call_indices=np.zeros(length, dtype=np.int32),
    )
    index = np.where(mask, np.cumsum(mask) - 1, -1)
    return TrainingRow(tokens, np.where(mask, 2.0, 0.0).astype(np.float32), weight, rollout, index)


def test_a_row_is_cut_after_its_last_trained_token() -> None:
    rollout = make_rollout([Turn([1, 2], [3]), Turn([4], [5, 6], parent=0), Turn([7, 7], [8], parent=1)], 1.0)
    (row,) = trained_rows(rollout, Selection())
    assert row.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 7, 8]
    assert row.loss_mask.tolist() == [False, False, True, False, True, True, False, False, True]
    assert num_trained([row]) == 4


def test_a_rollout_that_trains_nothing_has_no_rows() -> None:
    assert trained_rows(make_rollout([Turn([1], [2], kind="auxiliary")], 1.0), Selection()) == ()


@pytest.mark.parametrize(
    "sampling", [SamplingParams(temperature=0.0), SamplingParams(top_p=0.9), SamplingParams(top_k=5)]
)
def test_sampling_whose_logprobs_cannot_be_recomputed_is_refused(sampling: SamplingParams) -> None:
    with pytest.raises(ValueError, match="call 0 of rollout 'g/0'"):
        trained_rows(make_rollout([Turn([1], [2], sampling=sampling)], 1.0), Selection())


def test_such_sampling_is_fine_in_calls_that_are_not_trained() -> None:
    greedy = SamplingParams(temperature=0.0)
    rollout = make_rollout([Turn([1], [2]), Turn([3], [4], kind="auxiliary", sampling=greedy)], 1.0)
    assert num_trained(trained_rows(rollout, Selection())) == 1


def test_a_token_without_anything_before_it_is_refused() -> None:
    with pytest.raises(ValueError, match="a prompt before every trained token"):
        trained_rows(make_rollout([Turn([], [2])], 1.0), Selection())


def test_advantage_and_weight_of_a_rollout_reach_its_trained_tokens_only() -> None:
    rows = [trained_rows(make_rollout([Turn([1, 2], [3, 4])], 1.0), Selection()) for _ in range(2)]
    first, second = training_rows(rows, np.array([0.5, -1.0]), np.array([0.1, 0.2]))
    assert first.advantages.tolist() == [0.0, 0.0, 0.5, 0.5]
    assert second.advantages.tolist() == [0.0, 0.0, -1.0, -1.0]
    assert (first.weight, second.weight, first.rollout, second.rollout) == (0.1, 0.2, 0, 1)


def test_the_trained_tokens_of_a_batch_are_numbered_row_by_row() -> None:
    forked = [Turn([1, 2], [3, 4]), Turn([5], [6], parent=0), Turn([7], [8], parent=0, state="dead")]
    rows_of = [trained_rows(make_rollout(turns, 1.0), Selection(dead="train")) for turns in (forked, forked[:1])]
    rows = training_rows(rows_of, np.zeros(2), np.ones(2))
    assert [row.index.tolist() for row in rows] == [[-1, -1, 0, 1, -1, 2], [-1, -1, -1, -1, -1, 3], [-1, -1, 4, 5]]
    (batch,) = pack(rows, max_tokens=100)
    tokens = np.array([3, 4, 6, 8, 3, 4])
    assert tokens[batch.index].tolist() == batch.targets.tolist()
    assert sorted(batch.index.tolist()) == list(range(6))


def test_predictors_point_at_the_token_before() -> None:
    rows = [plain_row(4, [2, 3], rollout=1), plain_row(3, [1], rollout=2, weight=0.25)]
    (batch,) = pack(rows, max_tokens=100)
    assert batch.token_ids.tolist() == [[100, 101, 102, 103], [200, 201, 202, 0]]
    assert batch.targets.tolist() == [102, 103, 201]
    assert batch.token_ids.flatten()[batch.predictors].tolist() == [101, 102, 200]
    assert batch.weights.tolist() == [1.0, 1.0, 0.25]
    assert batch.temperatures.tolist() == pytest.approx([0.7] * 3)
    assert batch.rollout_logprobs.tolist() == [-0.5] * 3
    assert batch.advantages.tolist() == [2.0] * 3


@given(
    lengths=st.lists(st.integers(2, 40), max_size=30),
    max_tokens=st.integers(1, 200),
)
def test_packing_keeps_every_token_once_and_obeys_the_budget(lengths: list[int], max_tokens: int) -> None:
    rows = [plain_row(length, list(range(1, length)), rollout=index) for index, length in enumerate(lengths)]
    batches = pack(rows, max_tokens=max_tokens)
    packed = torch.cat([batch.targets for batch in batches]).tolist() if batches else []
    assert sorted(packed) == sorted(100 * index + t for index, length in enumerate(lengths) for t in range(1, length))
    for batch in batches:
        assert batch.token_ids.numel() <= max_tokens or len(batch.token_ids) == 1
        assert (batch.token_ids.flatten()[batch.predictors] + 1).tolist() == batch.targets.tolist()


def test_an_empty_batch_packs_to_nothing() -> None:
    assert pack([], max_tokens=8) == []
