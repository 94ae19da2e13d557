"""Every learner of the table keeps the contract, and the contract notices what breaks it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from clawgym_env.errors import ClawGymError
from clawgym_env.policy import Policy
from clawgym_env.registry import UnknownName
from clawgym_env.rollout import Rollout
from learners.base import Learner
from learners.grpo import TreeGRPO
from learners.registry import LEARNERS, make_learner
from learners.testing import ScriptedPolicy, check_learner, small_policy


def settings(policy: Policy) -> dict[str, Any]:
    return {"engine": ScriptedPolicy(policy, ["x"]), "learning_rate": 0.01}


@pytest.mark.parametrize("name", LEARNERS)
def test_a_learner_of_the_table_keeps_the_contract(name: str) -> None:
    check_learner(lambda policy: make_learner(name, policy, **settings(policy)))


@pytest.mark.parametrize("changes", [{"lora": 2}, {"kl_coef": 0.1}, {"updates_per_batch": 2}], ids=str)
def test_it_is_kept_with_other_settings_too(changes: dict[str, Any]) -> None:
    check_learner(lambda policy: make_learner("grpo", policy, **settings(policy), **changes))


class ForgetsItsOptimizer(TreeGRPO):
    def load_state_dict(self, state: Mapping[str, object]) -> None:
        optimizer = self._optimizer.state_dict()
        super().load_state_dict(state)
        self._optimizer.load_state_dict(optimizer)


class TrainsTheStale(TreeGRPO):
    def update(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        return super().update([dataclasses.replace(rollout, exclusion=None) for rollout in rollouts])


class TrainsTheStaleUnderAnotherName(TrainsTheStale):
    def state_dict(self) -> Mapping[str, object]:
        state = dict(super().state_dict())
        return {**state, "weights": state.pop("parameters"), "parameters": {}}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        super().load_state_dict({**state, "parameters": state["weights"]})


class StepsOutside(TreeGRPO):
    def _step(self) -> dict[str, float]:
        self._optimizer.step()
        self.engine().update_weights(lambda: None)
        return {"grad/norm": 0.0}


class BehindTheEngine(TreeGRPO):
    def update(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        metrics = super().update(rollouts)
        self.policy.version = 0
        return metrics


class SaysTensors(TreeGRPO):
    def update(self, rollouts: Sequence[Rollout]) -> dict[str, Any]:
        return {**super().update(rollouts), "loss/policy": torch.ones(1)}


class NewEngines(TreeGRPO):
    def engine(self) -> Any:
        return ScriptedPolicy(self.policy, ["x"])


class Idle(TreeGRPO):
    def update(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        return {}


class Counts(TreeGRPO):
    updates = 0

    def update(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        self.updates += 1
        return super().update(rollouts)

    def state_dict(self) -> Mapping[str, object]:
        return {**super().state_dict(), "updates": torch.tensor(float(self.updates))}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        super().load_state_dict(state)
        self.updates = int(cast(torch.Tensor, state["updates"]))


class Slotted(ScriptedPolicy):
    """Has no place for an attribute that its class does not name."""

    def __setattr__(self, name: str, value: object) -> None:
        if name == "update_weights":
            raise AttributeError(name)
        super().__setattr__(name, value)


def test_a_learner_that_counts_and_an_engine_that_takes_no_attributes_keep_the_contract() -> None:
    check_learner(lambda policy: Counts(policy, engine=Slotted(policy, ["x"]), learning_rate=0.01))


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (ForgetsItsOptimizer, "goes on exactly"),
        (TrainsTheStale, "excluded"),
        (TrainsTheStaleUnderAnotherName, "excluded"),
        (BehindTheEngine, "update_weights"),
        (StepsOutside, "update_weights"),
        (SaysTensors, "plain floats"),
        (NewEngines, "same engine"),
        (Idle, "changes the state"),
    ],
)
def test_what_breaks_the_contract_is_named(broken: type[TreeGRPO], complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        check_learner(lambda policy: broken(policy, **settings(policy)))


@pytest.mark.parametrize("spec", ["grpo", "learners.grpo:TreeGRPO", TreeGRPO])
def test_a_learner_is_had_by_name_import_path_or_class(spec: Any) -> None:
    policy = small_policy()
    learner = make_learner(spec, policy, learning_rate=0.5)
    assert isinstance(learner, TreeGRPO)
    assert learner.policy is policy


def test_an_installed_package_can_name_learners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[clawgym.learners]\ntheirs = learners.grpo:TreeGRPO\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert isinstance(make_learner("theirs", small_policy()), TreeGRPO)
    with pytest.raises(UnknownName, match="'theirs'"):
        make_learner("their", small_policy())


def test_a_learner_is_had_as_it_is_and_takes_nothing_beside() -> None:
    learner: Learner = TreeGRPO(small_policy())
    assert make_learner(learner) is learner
    with pytest.raises(ClawGymError, match="learner already"):
        make_learner(learner, learning_rate=0.5)


def test_an_unknown_learner_is_named_with_the_nearest_one() -> None:
    with pytest.raises(UnknownName, match="'grpo'"):
        make_learner("gpro", small_policy())


@pytest.mark.parametrize(("spec", "complaint"), [("grpo", "a policy"), ("builtins:repr", "make a Learner")])
def test_what_cannot_become_a_learner_is_refused(spec: str, complaint: str) -> None:
    with pytest.raises(ClawGymError, match=complaint):
        make_learner(spec, None if spec == "grpo" else small_policy())
