"""The Gymnasium ids: two per harness, one for each clock, registered when `clawgym_env` is imported."""

from __future__ import annotations

import difflib

from gymnasium.envs.registration import register, registry

IDS: dict[str, str] = {
    "mini": "Mini",
    "pi": "Pi",
    "claude-code": "ClaudeCode",
    "codex": "Codex",
    "openclaw": "OpenClaw",
    "qwen-code": "QwenCode",
    "opencode": "OpenCode",
    "command": "Command",
    "mini-swe-agent": "MiniSWE",
    "gemini-cli": "GeminiCLI",
    "agent-loop": "AgentLoop",
    "mix": "Mix",
}
"""Harness name (as in `clawgym install NAME`) to the middle of its id; "mix" draws one out of `MIX` for each group."""
MIX: tuple[str, ...] = ("mini", "pi")
"""The harnesses of "mix" unless `harness=` names others."""


def env_id(harness: str, *, call: bool = False) -> str:
    """Return the Gymnasium id of a harness: `env_id("mini") == "ClawGym-Mini-v0"`.

    Its twin on the call clock, on which a step is one model call, is `env_id("mini", call=True)`.

    Options after a question mark, as in "claude-code?bare", are no part of the id: pass the name with its options as
    `harness=` to `gym.make` too.

    Raises:
        ValueError: no id is registered for it; the message names the nearest. "mix" has no twin.
    """
    name = harness.partition("?")[0]
    if name not in IDS:
        near = difflib.get_close_matches(name, IDS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"Expected one of {', '.join(IDS)}, got {harness!r}.{hint}")
    if call and name == "mix":
        raise ValueError("Expected one harness for the call clock, got 'mix'. Give harness=[...] to any -Call id.")
    return f"ClawGym-{IDS[name]}{'-Call' if call else ''}-v0"


def register_all() -> None:
    """Register every id once; a second call changes nothing (a re-imported package must not warn)."""
    # A seed fixes the task and the sampling seeds, but neither the harness's clock nor the engine's kernels.
    for harness in IDS:
        if env_id(harness) not in registry:
            register(
                id=env_id(harness),
                entry_point="clawgym_env.envs.rollout:RolloutEnv",
                vector_entry_point="clawgym_env.envs.rollout_vector:RolloutVectorEnv",
                kwargs={"harness": list(MIX) if harness == "mix" else harness},
                nondeterministic=True,
            )
        if harness != "mix" and env_id(harness, call=True) not in registry:
            register(
                id=env_id(harness, call=True),
                entry_point="clawgym_env.envs.call:CallEnv",
                kwargs={"harness": harness},
                nondeterministic=True,
            )
