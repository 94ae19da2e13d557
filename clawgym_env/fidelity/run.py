"""Runs the conformance suite: scenarios one after the other, each a whole rollout of the installed harness.

The runner, sandbox, proxy and adapter are the real ones; only the engine is the teacher. `FidelityProxy` cuts the
connection where a scenario says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from clawgym_env import registry
from clawgym_env._loop import shared_loop
from clawgym_env.cache import cache_dir
from clawgym_env.engine.base import Generation, SamplingParams
from clawgym_env.errors import UsageError
from clawgym_env.fidelity.checks import as_expected, count_forks, main_drift, same_render, same_tokens, sound_tree
from clawgym_env.fidelity.expectations import expectation
from clawgym_env.fidelity.report import FidelityReport, Problem, ScenarioResult
from clawgym_env.fidelity.scenarios import INSTRUCTION, ROW, SCENARIOS, Expectation, Scenario, lines
from clawgym_env.fidelity.teacher import WIDE, TeacherEngine
from clawgym_env.grading.function import FunctionGrader
from clawgym_env.harness import HarnessAdapter
from clawgym_env.policy import PolicyText, load_text
from clawgym_env.proxy.app import ProxyServer
from clawgym_env.rollout import Rollout
from clawgym_env.runner import RolloutRequest, Runner, ServedPolicy
from clawgym_env.sandbox.base import SandboxBackend
from clawgym_env.tasks.task import Limits, Task

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

MAX_TOKENS = 1024
LIMITS = Limits(max_calls=60, wall_clock_s=400.0)
ROOM = 40_000
"""Tokens between the harness's first prompt and the end of a small window, beside half of that prompt. Qwen Code keeps
33,000 of any window free."""
STEPS = 24
"""In how many turns the script fills that room: each must fit between a harness's limit and the end of the window."""
PROBE = Scenario("probe", lines())

Tamper = Callable[[Generation], Generation]


class FidelityProxy(ProxyServer):
    """A proxy that cuts the connection where the teacher is to be hung up on."""

    def __init__(self, teacher: TeacherEngine) -> None:
        super().__init__()
        self._teacher = teacher

    async def _serve_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_or_cut(message: Message) -> None:
            last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if last and self._teacher.hang_up_due:
                self._teacher.hang_up_due, self._teacher.hung_up = False, True
                scope["state"]["peer"].reset()
                return
            await send(message)

        await super()._serve_request(scope, receive, send_or_cut)


def run_fidelity(
    harness: str | HarnessAdapter,
    policy: str | Path | PolicyText = "tiny",
    *,
    scenarios: Sequence[str] | None = None,
    sandbox: str | SandboxBackend = "local",
    cache: Path | None = None,
    tamper: Tamper = lambda generation: generation,
    on_result: Callable[[ScenarioResult], None] = lambda result: None,
) -> FidelityReport:
    """Run the conformance suite of an installed harness with a policy's tokens, and return what came of it.

    Args:
        policy: "tiny", "smollm2", a Hugging Face folder (no weights are loaded), "bytes" (no file needed), or loaded.
        scenarios: names out of `SCENARIOS`; all by default.
        cache: where harnesses and policies are kept; the user's own by default.
        tamper: what a faulty engine does to its answers; for tests of the suite.
        on_result: called after each scenario.

    Raises:
        HarnessNotInstalled, PolicyNotBuilt: with the command to run.
        UsageError: an unknown scenario, or options a harness does not take.
    """
    known = {scenario.name: scenario for scenario in SCENARIOS}
    chosen = list(known) if scenarios is None else list(scenarios)
    if unknown := [name for name in chosen if name not in known]:
        raise UsageError(f"Expected scenarios out of {', '.join(known)}, got {', '.join(unknown)}.")
    cache = cache or cache_dir()
    adapter = registry.adapter(harness)
    adapter.mounts(cache)  # a missing harness shows here
    suite = _Suite(
        spec=harness if isinstance(harness, str) else harness.name,
        adapter=adapter,
        text=policy if isinstance(policy, PolicyText) else load_text(policy, cache=cache),
        backend=registry.backend(sandbox),
        cache=cache,
        tamper=tamper,
    )
    results: list[ScenarioResult] = []
    for name in chosen:
        results.append(shared_loop().run(suite.judge(known[name])))
        on_result(results[-1])
    return FidelityReport(suite.spec, adapter.version, suite.text.name, tuple(results))


@dataclasses.dataclass(slots=True)
class _Suite:
    spec: str
    adapter: HarnessAdapter
    text: PolicyText
    backend: SandboxBackend
    cache: Path
    tamper: Tamper
    first_prompt: int | None = None
    """Tokens of the harness's first main prompt, once seen."""

    async def judge(self, scenario: Scenario) -> ScenarioResult:
        """Run a scenario and compare."""
        expect = expectation(self.spec, scenario)
        if expect.skip:
            return ScenarioResult(scenario.name, "n/a", note=expect.skip)
        window = await self._small_window() if scenario.small_window else WIDE
        teacher, rollout = await self._play(scenario, expect, window=window)
        if teacher.missing:
            return ScenarioResult(scenario.name, "n/a", note=teacher.missing, outline=rollout.tree.outline())
        return self._result(scenario, expect, teacher, rollout)

    async def _small_window(self) -> int:
        """Return a window that is a little larger than the harness's first prompt."""
        if self.first_prompt is None:
            await self._play(PROBE, Expectation(), window=WIDE)
        first = self.first_prompt or 0
        return first + first // 2 + ROOM

    async def _play(self, scenario: Scenario, expect: Expectation, *, window: int) -> tuple[TeacherEngine, Rollout]:
        rows = (window - (self.first_prompt or 0)) // STEPS // len(self.text.tokenizer.encode(ROW))
        teacher = TeacherEngine(
            scenario, self.text, adapter=self.adapter, context_length=window, rows=rows, tamper=self.tamper
        )
        proxy = FidelityProxy(teacher)
        await proxy.start()
        try:
            runner = Runner(backend=self.backend, grader=FunctionGrader(_files(expect)), proxy=proxy, cache=self.cache)
            task = Task(id=scenario.name, instruction=INSTRUCTION, limits=LIMITS)
            served = ServedPolicy(self.text.name, teacher, SamplingParams(max_tokens=MAX_TOKENS))
            rollout = await runner.run(
                RolloutRequest(task, self.adapter, served, group_id=scenario.name, index=0, seed=0)
            )
        finally:
            await proxy.close()
        prompts = (len(record.prompt_token_ids) for record in teacher.records if record.role == "main")
        self.first_prompt = self.first_prompt or next(prompts, None)
        return teacher, rollout

    def _result(
        self, scenario: Scenario, expect: Expectation, teacher: TeacherEngine, rollout: Rollout
    ) -> ScenarioResult:
        tree, records = rollout.tree, teacher.records
        append_only = type(self.adapter).transient_suffix is HarnessAdapter.transient_suffix
        different = list(same_tokens(records, tree, self._decode))
        template_drift, other_renders = same_render(records, tree, self.text.renderer, self._decode)
        problems = [
            *different,
            *sound_tree(tree, self._decode, append_only=append_only),
            *other_renders,
            *as_expected(tree, expect, segments=teacher.segments, append_only=append_only),
        ]
        if scenario.fault == "hang_up" and not teacher.hung_up:
            problems.append(Problem("Expected the connection to be cut once, got no reply to cut"))
        if scenario.small_window and teacher.segments == 1:
            problems.append(Problem("Expected a compaction, got none"))
        if expect.files and rollout.reward != 1.0:
            problems.append(Problem(f"Expected the workspace files {sorted(expect.files)}, got other ones"))
        ending = f"{rollout.stop_reason}" + (f": {rollout.error}" if rollout.error else "")
        return ScenarioResult(
            scenario=scenario.name,
            verdict="FAIL" if problems else "ok",
            calls=len(tree),
            main_calls=sum(call.kind == "main" for call in tree),
            subagent_calls=sum(call.kind == "subagent" for call in tree),
            kept=sum(path.kind == "main" for path in tree.trajectories()),
            segments=teacher.segments,
            forks=count_forks(tree),
            drift=main_drift(tree),
            buckets={name: count for name, count in tree.buckets().items() if count},
            identical=not different,
            template_drift=template_drift,
            problems=tuple(problems),
            note="" if ending == "completed" else ending,
            outline=tree.outline(self._decode),
            output=rollout.harness_output,
        )

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self.text.tokenizer.decode(token_ids)


def _files(expect: Expectation) -> Callable[[Task, Path], float]:
    def holds(task: Task, workspace: Path) -> float:
        files = expect.files.items()
        return float(
            all((workspace / name).is_file() and (workspace / name).read_text() == text for name, text in files)
        )

    return holds
