"""An API model through whole harnesses: a real `clawgym proxy` is the API, and what comes of it is graded."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import httpx
import pytest

from clawgym_env import cli, registry
from clawgym_env.cache import cache_dir
from clawgym_env.messages import Json
from clawgym_env.rollout import Rollout
from clawgym_env.trace.prefix_tree import PrefixTree
from clawgym_env.trace.store import RolloutStore

ROOT = Path(__file__).parents[2]
KEY = "sk-of-the-api"
COMMAND = "echo apple > answer.txt"
SHELLS: dict[str, tuple[str, dict[str, Json]]] = {
    "mini": ("bash", {"command": COMMAND}),
    "mini?dialect=messages": ("bash", {"command": COMMAND}),
    "pi": ("bash", {"command": COMMAND}),
    "claude-code": ("Bash", {"command": COMMAND, "description": "x"}),
    "codex": ("exec_command", {"cmd": COMMAND}),
}
"""How each harness is told to run the command."""


@dataclass
class Api:
    """A rollout of the proxy that stands for an API."""

    base_url: str
    admin_url: str
    headers: dict[str, str]

    @property
    def engine(self) -> str:
        return f"openai:{self.base_url}/v1#some-model"

    def tree(self) -> PrefixTree:
        """Return what the API was asked."""
        return PrefixTree.from_json(httpx.get(self.admin_url, headers=self.headers, timeout=60).json()["tree"])


@contextmanager
def serving(folder: Path, tool: str, arguments: dict[str, Json]) -> Iterator[Api]:
    """Run `clawgym proxy` with a model that calls one tool and then says that it is done."""
    script = folder / "script.json"
    script.write_text(json.dumps([{"text": "I write it.", "tool": tool, "arguments": arguments}, "It is written."]))
    (folder / "token").write_text("secret\n")
    argv = [sys.executable, "-m", "clawgym_env.cli", "proxy", "--engine", f"scripted:{script}"]
    argv += ["--port", "0", "--admin-token-file", str(folder / "token")]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            admin = process.stdout.readline().split()[1]
            headers = {"authorization": "Bearer secret"}
            ticket = httpx.post(f"{admin}/rollouts", headers=headers, timeout=60).json()
            yield Api(ticket["base_url"], f"{admin}/rollouts/{ticket['id']}", headers)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=60)


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """One task in the ClawGym format."""
    task = tmp_path / "tasks" / "task_0000"
    (task / "reward").mkdir(parents=True)
    entry = {"task_id": task.name, "user_query": "Write apple to answer.txt.", "metadata": {}}
    (task / "data_entry.json").write_text(json.dumps(entry))
    (task / "reward" / "reward.sh").write_text("grep -qx apple answer.txt && echo 1.0 || echo 0.0\n")
    return task.parent


def check(rollout: Rollout, asked: PrefixTree) -> None:
    """Hold a rollout to what the API was asked."""
    tree = rollout.tree
    assert (rollout.reward, rollout.exclusion, rollout.trainable) == (1.0, "relayed", False)
    assert all(call.relayed for call in tree)
    main = [call for call in tree if call.kind == "main"]
    assert [call.lineage_parent for call in main] == [None, main[0].index]
    assert main[1].prefix_len == main[0].history_len, "the stand-in's tokens go on"
    prompts = {call.prompt_len: len(call.token_ids) for call in asked}
    for call in tree:
        assert call.api_usage is not None
        assert prompts[call.api_usage.prompt_tokens] == call.api_usage.completion_tokens
    assert tree.usage.prompt_tokens == sum(call.api_usage.prompt_tokens for call in tree if call.api_usage)
    assert tree.rows() == ()


def evaluate(tasks: Path, harnesses: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Rollout]:
    """Run `clawgym eval` on the task through harnesses with one and the same shell, and return the rollouts."""
    monkeypatch.setenv("CLAWGYM_RELAY_API_KEY", KEY)
    out = folder / "out"
    with serving(folder, *SHELLS[harnesses[0]]) as api:
        argv = ["eval", "--tasks", str(tasks), "--engine", api.engine, "--harness", *harnesses, "--out", str(out)]
        assert cli.main(argv) == 0
        asked = api.tree()
    results = json.loads((out / "results.json").read_text())
    assert (results["pass_at_1"], results["settings"]["policy"]) == (1.0, api.engine)
    with RolloutStore(out, read_only=True) as store:
        rollouts = list(store.rollouts())
    for rollout, result in zip(rollouts, results["tasks"], strict=True):
        check(rollout, asked)
        assert result["prompt_tokens"] == [rollout.tree.usage.prompt_tokens]
    assert not [file for file in out.rglob("*") if file.is_file() and KEY.encode() in file.read_bytes()]
    return rollouts


def test_eval_and_the_environment_grade_an_api_model_through_mini_in_each_dialect(
    tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rollouts = evaluate(tasks, ["mini", "mini?dialect=messages"], tmp_path, monkeypatch)
    assert [rollout.tree[0].dialect for rollout in rollouts] == ["chat", "messages"]
    assert KEY not in "".join(capsys.readouterr())
    with serving(tmp_path, *SHELLS["mini"]) as api:
        env = gym.make("ClawGym-Mini-v0", engine=api.engine, tasks=str(tasks))
        try:
            env.reset(seed=1)
            _, reward, terminated, _, info = env.step(0)
        finally:
            env.close()
        (rollout,) = [info["rollout"]]
        check(rollout, api.tree())
    assert (reward, terminated) == (1.0, True)
    assert (info["num_prompt_tokens"], info["num_calls"]) == (rollout.tree.usage.prompt_tokens, 2)


@pytest.mark.harness
@pytest.mark.parametrize(("harness", "dialect"), [("pi", "chat"), ("claude-code", "messages"), ("codex", "responses")])
def test_a_real_harness_is_answered_by_an_api_that_speaks_chat_whatever_it_speaks(
    harness: str, dialect: str, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.adapter(harness).install(cache_dir())
    (rollout,) = evaluate(tasks, [harness], tmp_path, monkeypatch)
    assert {call.dialect for call in rollout.tree} == {dialect}
