"""A judge behind the environments and the command line: named, refused in time, cached, retried, shown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import httpx
import numpy as np
import pytest
from judge_fakes import Endpoint, verdict

import clawgym_env  # noqa: F401 (registers the ids)
from clawgym_env import cli
from clawgym_env._loop import shared_loop
from clawgym_env.engine.scripted import ScriptedEngine
from clawgym_env.errors import JudgeMissing
from clawgym_env.grading import JudgeUsage
from clawgym_env.grading.specs import CommandGrading, Criterion, HybridGrading, RubricGrading
from clawgym_env.proxy.app import ProxyServer
from clawgym_env.rollout import Rollout, StopReason
from clawgym_env.tasks import Limits, Task, TaskFile
from clawgym_env.testing import Ask, FakeBackend, InProcessHarness
from clawgym_env.trace.store import RolloutStore

RUBRIC = RubricGrading(criteria=(Criterion(name="kind", question="Is it kind?"),))
PLAIN = Task(id="plain", instruction="Say hi.", hidden_files=(TaskFile(path="reward/reward.sh", data=b"echo 1"),))
JUDGED = Task(id="judged", instruction="Say hi.", grading=RUBRIC)
GOOD = verdict(0.75, notes="Kind enough.")
BUSY = httpx.Response(503)


def keywords(**changes: Any) -> dict[str, Any]:
    return {
        "tasks": [JUDGED],
        "harness": InProcessHarness(),
        "engine": ScriptedEngine(lambda prompt, turn: "Hello, dear."),
        "sandbox": FakeBackend(),
        **changes,
    }


def step(**changes: Any) -> tuple[Rollout, dict[str, Any]]:
    env = gym.make("ClawGym-Mini-v0", disable_env_checker=True, **keywords(**changes))
    try:
        env.reset(seed=0)
        _, reward, _, _, info = env.step(np.int64(0))
        assert reward == info["rollout"].reward
        return info["rollout"], info
    finally:
        env.close()


def test_a_task_that_needs_a_judge_is_refused_before_anything_starts() -> None:
    backend = FakeBackend()
    with pytest.raises(JudgeMissing, match="judge='URL#MODEL'"):
        step(sandbox=backend)
    envs = gym.make_vec(
        "ClawGym-Mini-v0",
        num_envs=2,
        vectorization_mode="vector_entry_point",
        **keywords(tasks=[PLAIN, JUDGED], sandbox=backend),
    )
    try:
        envs.reset(seed=0)
        with pytest.raises(JudgeMissing, match="task 'judged'"):
            envs.step(envs.action_space.sample())
    finally:
        envs.close()
    assert backend.most_alive == 0


def test_a_task_without_a_rubric_needs_no_judge() -> None:
    assert step(tasks=[PLAIN])[0].reward == 1.0


def test_the_verdict_is_the_reward_and_a_run_that_goes_on_pays_nothing_again(tmp_path: Path) -> None:
    endpoint = Endpoint([GOOD])
    rollout, info = step(judge=endpoint.judge(max_retries=0), run_dir=tmp_path)
    assert (rollout.reward, info["reward_components"]) == (0.75, {"kind": 0.75})
    assert rollout.grade is not None
    assert rollout.grade.judge_usage == JudgeUsage(1, 0, 10, 2)
    assert "Kind enough." in rollout.grade.output
    with RolloutStore(tmp_path, read_only=True) as store:
        (kept,) = store.rollouts()
    assert kept.grade == rollout.grade
    again, _ = step(judge=endpoint.judge(max_retries=0), run_dir=tmp_path)
    assert again.grade is not None
    assert (again.reward, again.grade.judge_usage) == (0.75, JudgeUsage(cached=1))
    assert len(endpoint.asked) == 1


@pytest.mark.parametrize(("failures", "reason"), [(2, StopReason.COMPLETED), (3, StopReason.GRADER_ERROR)])
def test_a_judge_that_fails_is_asked_again_without_another_run_and_is_never_a_zero(
    failures: int, reason: StopReason
) -> None:
    runs: list[int] = []

    async def act(ask: Ask, sandbox: Any, context: Any) -> str:
        runs.append(1)
        answer = await ask(context.instruction)
        await sandbox.write_file(f"{context.workdir}/answer.txt", answer.encode())
        return answer

    endpoint = Endpoint([*[BUSY] * failures, GOOD])
    rollout, _ = step(judge=endpoint.judge(max_retries=0), harness=InProcessHarness(act))
    assert (rollout.stop_reason, len(runs), len(endpoint.asked)) == (reason, 1, 3)
    assert rollout.graded == rollout.trainable == (reason is StopReason.COMPLETED)
    assert rollout.reward == (0.75 if rollout.graded else 0.0)
    assert ("status 503" in rollout.error) != rollout.graded


def test_a_command_that_fails_once_does_not_pay_the_judge_twice(tmp_path: Path) -> None:
    script = f"[ -e {tmp_path}/second ] && echo 1 || touch {tmp_path}/second"
    hybrid = HybridGrading(automated=CommandGrading(), rubric=RUBRIC)
    hidden = (TaskFile(path="reward/reward.sh", data=script.encode()),)
    endpoint = Endpoint([GOOD])
    task = JUDGED.model_copy(update={"grading": hybrid, "hidden_files": hidden})
    rollout, _ = step(judge=endpoint.judge(max_retries=0), tasks=[task])
    assert rollout.reward == pytest.approx(0.7 + 0.3 * 0.75)
    assert len(endpoint.asked) == 1


def test_the_agents_own_sandbox_is_judged_too_and_only_once() -> None:
    endpoint = Endpoint([BUSY, GOOD])
    same = JUDGED.model_copy(update={"grade_in": "same"})
    assert step(judge=endpoint.judge(max_retries=0), tasks=[same])[0].stop_reason is StopReason.GRADER_ERROR
    assert len(endpoint.asked) == 1
    assert step(judge=endpoint.judge(max_retries=0), tasks=[same])[0].reward == 0.75


@pytest.fixture
def served() -> Iterator[tuple[str, list[str]]]:
    """A scripted policy as judge on a real socket: its "URL#MODEL", and the prompts that reach it."""
    server, prompts = ProxyServer(), []

    def answer(prompt: str, turn: int) -> str:
        prompts.append(prompt)
        return GOOD

    async def start() -> str:
        await server.start()
        listener = await server.listen_tcp()
        session = server.open_session(ScriptedEngine(answer), limits=Limits(max_calls=100))
        return f"http://127.0.0.1:{listener.port}/r/{session.key}/v1#strict"

    try:
        yield shared_loop().run(start()), prompts
    finally:
        shared_loop().run(server.close())


def test_a_judge_is_given_by_address_and_model(served: tuple[str, list[str]]) -> None:
    spec, prompts = served
    rollout, _ = step(judge=spec)
    assert (rollout.reward, len(prompts)) == (0.75, 1)
    assert "Hello, dear." in prompts[0]


def test_the_command_line_takes_a_judge_and_shows_parts_and_cost(
    served: tuple[str, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    anchors = {"0": "no", "0.25": "hardly", "0.5": "half", "0.75": "mostly", "1": "yes"}
    rule = {"name": "kind", "file_path": "answer.txt", "scores": anchors}
    entry = {"task_id": "t", "user_query": "Say hi.", "metadata": {"rubrics": {"rules": [rule]}}}
    (tmp_path / "task" / "reward").mkdir(parents=True)
    (tmp_path / "task" / "data_entry.json").write_text(json.dumps(entry))
    (tmp_path / "task" / "reward" / "reward.sh").write_text("echo '{\"there\": 1}'; echo 1")
    (tmp_path / "script.json").write_text('["Hello, dear."]')
    flags = ["--sandbox", "clawgym_env.testing:FakeBackend", "--harness", "clawgym_env.testing:InProcessHarness"]
    flags += ["--tasks", str(tmp_path / "task"), "--engine", f"scripted:{tmp_path / 'script.json'}", "-v"]
    assert cli.main(["rollout", *flags, "--judge", served[0]]) == 0
    printed = capsys.readouterr().out
    assert "reward 0.925 (automated 1, rubric 0.75, automated/there 1, rubric/kind 0.75)" in printed
    assert "-- judge\n  calls 1, answered before 0, tokens" in printed
    assert cli.main(["rollout", *flags]) != 0
    assert "--judge URL#MODEL" in capsys.readouterr().err


def test_the_key_of_a_judge_comes_from_the_environment_at_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from clawgym_env.cli._rollout_args import CommonRolloutArgs

    monkeypatch.setenv("CLAWGYM_JUDGE_API_KEY", "secret")
    judge = CommonRolloutArgs(judge="http://judge/v1#m").load_judge()
    assert judge is not None
    assert judge._api.without_key("it is secret") == "it is (the API key)"
    assert CommonRolloutArgs().load_judge() is None
