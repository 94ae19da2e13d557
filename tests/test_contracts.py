"""What is shipped keeps the contracts, and the checks notice what breaks them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest

from clawgym_env.engine.base import Generation, SamplingParams, TokenIds
from clawgym_env.engine.scripted import ScriptedEngine
from clawgym_env.sandbox.base import ExecResult, Sandbox, SandboxSpec
from clawgym_env.sandbox.fake import FakeSandbox
from clawgym_env.sandbox.local import LocalBackend
from clawgym_env.testing import FakeBackend, check_backend, check_engine


@pytest.mark.parametrize("reply", ["yes", "a reply that is too long for the budget"])
def test_the_scripted_engine_keeps_the_contract(reply: str) -> None:
    check_engine(ScriptedEngine([reply]))


@pytest.mark.parametrize("made", [FakeBackend, LocalBackend])
def test_the_backends_without_a_daemon_keep_the_contract(made: Callable[[], FakeBackend | LocalBackend]) -> None:
    check_backend(made())


class Broken(ScriptedEngine):
    """Changes what it generates."""

    def __init__(self, changes: Mapping[str, object]) -> None:
        super().__init__(["yes"])
        self._changes = changes

    async def generate(self, prompt_token_ids: Sequence[int] | TokenIds, sampling: SamplingParams) -> Generation:
        generation = await super().generate(prompt_token_ids, sampling)
        return dataclasses.replace(generation, **self._changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"logprobs": np.zeros(1, dtype=np.float32)}, "log-probability per id"),
        ({"logprobs": np.full(4, 0.5, dtype=np.float32)}, "finite, in nats"),
        ({"finish_reason": "length"}, "finish reason"),
        ({"policy_versions": ()}, "cover all ids"),
        ({"token_ids": np.zeros(4, dtype=np.int64)}, "int32"),
    ],
)
def test_an_engine_that_answers_otherwise_is_found(changes: Mapping[str, object], wrong: str) -> None:
    with pytest.raises(AssertionError, match=wrong):
        check_engine(Broken(changes))


class NeverCounts(ScriptedEngine):
    def update_weights(self, apply: Callable[[], None]) -> int:
        apply()
        return self.policy_version


def test_an_engine_that_does_not_count_its_versions_is_found() -> None:
    with pytest.raises(AssertionError, match="counts policy_version up"):
        check_engine(NeverCounts(["yes"]))


class Forgetful(FakeSandbox):
    async def exec(self, argv: Sequence[str], **settings: object) -> ExecResult:  # type: ignore[override]
        done = await super().exec(argv, **settings)  # type: ignore[arg-type]
        return dataclasses.replace(done, exit_code=0)


class ForgetfulBackend(FakeBackend):
    async def open(self, spec: SandboxSpec) -> Sandbox:
        return Forgetful(spec, self.alive.discard)


def test_a_sandbox_that_hides_exit_codes_is_found() -> None:
    with pytest.raises(AssertionError, match="exit codes"):
        check_backend(ForgetfulBackend())
