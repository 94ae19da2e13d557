"""Demonstrations through a real harness: a task's known steps, said by a scripted policy to the harness itself.

The teacher of a cold start (`sft.finetune`): the harness, its proxy and its sandbox are the real ones, so a policy
learns in exactly the prompts it will meet. Invariant: what a demonstration says is in the policy's own tokens, as the
policy would have sampled them; its log-probabilities are made up and never used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from clawgym_env.engine.scripted import ScriptedEngine
from clawgym_env.envs.sampler import Draw, derived_seed
from clawgym_env.envs.service import RolloutService, SandboxLike
from clawgym_env.fidelity.scenarios import Turn
from clawgym_env.fidelity.teacher import write_turn
from clawgym_env.fidelity.tools import Call
from clawgym_env.grading.base import GraderLike
from clawgym_env.harness import HarnessAdapter
from clawgym_env.messages import ChatRequest
from clawgym_env.policy import Policy, PolicyText
from clawgym_env.rollout import Rollout
from clawgym_env.tasks.task import SolutionStep, Task

ANSWER = "Done."


def demonstrate(
    policy: Policy,
    tasks: Sequence[Task],
    steps: Callable[[Task], Sequence[SolutionStep]],
    *,
    harness: str | HarnessAdapter = "mini",
    answer: str = ANSWER,
    sandbox: SandboxLike = "local",
    grader: GraderLike | None = None,
    run_dir: str | Path | None = None,
    max_concurrency: int = 1,
) -> list[Rollout]:
    """Play every task's steps through a harness, one call a turn, and return the graded rollouts in order.

    Args:
        policy: whose tokens are spoken; its weights are not used.
        steps: of a task, for example `TaskSet.solution`, flaws included where the policy is to have something to gain.
            Each is a call of the harness's tool of that name: mini, pi and agent-loop have write(path, content),
            read(path) and bash(command).
        answer: the closing line.
        grader: instead of the tasks' own.
        run_dir: where they are kept for later, as any run's.

    Raises:
        ValueError: two tasks of the same instruction, or a step that no tool call can say.
        HarnessNotInstalled: with the command to run.
    """
    text = PolicyText(policy.name, policy.tokenizer, policy.renderer)
    replies = {task.instruction: [*(_say(text, step) for step in steps(task)), answer] for task in tasks}
    if len(replies) < len(tasks):
        raise ValueError(f"Expected tasks of different instructions, got {len(replies)} for {len(tasks)} tasks.")

    def reply(prompt: str, turn: int) -> str:
        # The longest: an instruction may be the beginning of another one.
        script = replies[max((instruction for instruction in replies if instruction in prompt), key=len)]
        return script[min(turn, len(script) - 1)]

    engine = ScriptedEngine(
        reply, tokenizer=policy.tokenizer, renderer=policy.renderer, context_length=policy.context_length
    )
    service = RolloutService(
        tasks=tasks,
        harness=harness,
        engine=engine,
        sandbox=sandbox,
        grader=grader,
        run_dir=run_dir,
        max_concurrency=max_concurrency,
    )
    with closing(service):
        name = service.harnesses[0].name
        groups = [Draw(task, 0, f"demo-{name}-{n:06d}", derived_seed(task.id, name)) for n, task in enumerate(tasks)]
        return service.run([service.request(draw) for draw in groups])


def _say(text: PolicyText, step: SolutionStep) -> str:
    """Return a step as a reply in the policy's own form of a tool call."""
    if step.tool not in ("write", "read", "bash"):
        raise ValueError(f"Expected steps that are calls of write, read or bash, got {step.tool!r}.")
    request = ChatRequest("chat", text.name, messages=())
    ids, _ = write_turn(text, Turn(calls=(Call(step.tool, dict(step.arguments)),)), request)
    return text.tokenizer.decode(ids[:-1])  # the engine closes the turn itself
