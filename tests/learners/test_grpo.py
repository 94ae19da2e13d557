from typing import Any

from learner_fakes import CountingEngine, make_policy

from learners.base import Learner
from learners.grpo import TreeGRPO


def test_it_is_a_learner() -> None:
    policy = make_policy()
    engine: Any = CountingEngine(policy)
    learner = TreeGRPO(policy, engine=engine)
    assert isinstance(learner, Learner)
    assert learner.engine() is learner.engine() is engine
