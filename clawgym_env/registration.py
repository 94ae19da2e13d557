"""The Gymnasium ids: one row per harness, registered when `clawgym_env` is imported."""

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


def env_id(harness: str) -> str:
    """Return the Gymnasium id of a harness: `env_id("mini") == "ClawGym-Mini-v0"`.

    Options after a question mark, as in "claude-code?bare", are no part of the id: pass the name with its options as
    `harness=` to `gym.make` too.

    Raises:
        ValueError: no id is registered for it; the message names the nearest.
    """
    name = harness.partition("?")[0]
    if name not in IDS:
        near = difflib.get_close_matches(name, IDS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"Expected one of {', '.join(IDS)}, got {harness!r}.{hint}")
    return f"ClawGym-{IDS[name]}-v0"


def register_all() -> None:
    """Register every id once; a second call changes nothing (a re-imported package must not warn)."""
    for harness in IDS:
        if env_id(harness) in registry:
            continue
        register(
            id=env_id(harness),
            entry_point="clawgym_env.envs.rollout:RolloutEnv",
            vector_entry_point="clawgym_env.envs.rollout_vector:RolloutVectorEnv",
            kwargs={"harness": list(MIX) if harness == "mix" else harness},
            # A seed fixes the task and the sampling seeds, but neither the harness's clock nor the engine's kernels.
            nondeterministic=True,
        )
