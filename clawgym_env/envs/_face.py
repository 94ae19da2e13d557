"""The observation and info of a rollout: one vocabulary for the single and the vector environment."""

from __future__ import annotations

from typing import Any, TypeAlias, TypedDict, cast

from gymnasium import Space, spaces

from clawgym_env.envs.sampler import Draw
from clawgym_env.harness import HarnessAdapter
from clawgym_env.rollout import TRUNCATED, Rollout
from clawgym_env.spaces import TraceSpace, Unicode
from clawgym_env.trace.prefix_tree import PrefixTree

MAX_TEXT = 1 << 20
"""Code points of an instruction or response shown in an observation; the rollout holds them whole."""

Info: TypeAlias = dict[str, Any]


class Observation(TypedDict):
    """A member of the observation space."""

    instruction: str
    response: str
    """The harness's visible answer; empty until the rollout has run."""
    harness: int
    """Index of the harness."""
    trace: PrefixTree
    """Empty until the rollout has run."""


def observation_space(num_harnesses: int) -> Space[Observation]:
    """Return the space of `Observation`."""
    space = spaces.Dict(
        {
            "instruction": Unicode(MAX_TEXT),
            "response": Unicode(MAX_TEXT),
            "harness": spaces.Discrete(num_harnesses),
            "trace": TraceSpace(),
        }
    )
    return cast("Space[Observation]", space)


def observe(draw: Draw, rollout: Rollout | None = None) -> Observation:
    """Return what is seen of a drawn task, or of its finished rollout."""
    return Observation(
        instruction=draw.task.instruction[:MAX_TEXT],
        response="" if rollout is None else rollout.response[:MAX_TEXT],
        harness=draw.harness,
        trace=PrefixTree() if rollout is None else rollout.tree,
    )


def known_options(options: dict[str, Any] | None, *known: str) -> dict[str, Any]:
    """Return the options of a reset, refusing a misspelt one."""
    if unknown := sorted(set(options or {}) - set(known)):
        raise ValueError(f"Expected reset options out of {', '.join(known)}, got {', '.join(unknown)}.")
    return options or {}


def reset_info(draw: Draw, harness: HarnessAdapter) -> Info:
    """Return the info of a reset."""
    return {"task_id": draw.task.id, "harness": harness.name, "group_id": draw.group_id}


def final_info(rollout: Rollout) -> Info:
    """Return the info of a finished rollout. Numbers keep one type each: Gymnasium batches by the first one's."""
    components = rollout.grade.components if rollout.grade is not None else {}
    usage = rollout.tree.usage
    return {
        "task_id": rollout.task_id,
        "harness": rollout.harness,
        "group_id": rollout.group_id,
        "rollout": rollout,
        "stop_reason": rollout.stop_reason.value,
        "graded": rollout.graded,
        "is_success": rollout.reward >= 1.0,
        "reward_components": {name: float(value) for name, value in components.items()},
        "num_calls": len(rollout.tree),
        "num_trajectories": len(rollout.tree.trajectories()),
        "num_prompt_tokens": usage.prompt_tokens,
        "num_completion_tokens": usage.completion_tokens,
        "policy_version": min((call.policy_version for call in rollout.tree.calls), default=0),
        "timing": {name: float(value) for name, value in rollout.timing.items()},
    }


def ended(rollout: Rollout) -> tuple[bool, bool]:
    """Return (terminated, truncated): the harness's own end, or our budget or infrastructure."""
    truncated = rollout.stop_reason in TRUNCATED or not rollout.graded
    return not truncated, truncated


def draw_rollout(rollout: Rollout | None) -> str:
    """Return a rollout as text: the tree, then the grade. Empty before there is one."""
    if rollout is None:
        return ""
    return f"{rollout.tree.outline()}\n{grade_line(rollout)}".lstrip("\n")


def grade_line(rollout: Rollout) -> str:
    """Return the verdict on a rollout in one line."""
    if rollout.grade is None:
        return f"{rollout.stop_reason.value}, no grade: {rollout.error or 'unknown'}"
    parts = ", ".join(f"{name} {value:.3g}" for name, value in rollout.grade.components.items())
    return f"{rollout.stop_reason.value}, reward {rollout.reward:.3f}" + (f" ({parts})" if parts else "")
