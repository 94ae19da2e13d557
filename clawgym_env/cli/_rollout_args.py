"""The flags that every command running rollouts has: on what, with which policy, how sampled, how far."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clawgym_env import registry
from clawgym_env.cache import cache_dir
from clawgym_env.engine.base import SamplingParams
from clawgym_env.envs.service import DEFAULT_POLICY, DEFAULT_TASKS
from clawgym_env.grading.judge import Judge

if TYPE_CHECKING:
    from clawgym_env.policy import Policy

JUDGE_API_KEY = "CLAWGYM_JUDGE_API_KEY"


@dataclass(frozen=True, kw_only=True)
class CommonRolloutArgs:
    """On what, with which policy, how sampled, how far."""

    tasks: str = DEFAULT_TASKS
    """A folder of tasks, or a name such as "bundled:level=1"."""
    policy: str = DEFAULT_POLICY
    """tiny, smollm2 or a Hugging Face folder."""
    engine: str | None = None
    """"scripted:FILE", "vllm:URL", "openai:URL#MODEL" (for evaluation; its key is taken from CLAWGYM_RELAY_API_KEY) or
    an import path, instead of the policy."""
    sandbox: str = "local"
    judge: str | None = None
    """URL#MODEL of the OpenAI-compatible server that answers rubrics; its key is taken from CLAWGYM_JUDGE_API_KEY."""
    max_tokens: int = 1024
    """Sampled tokens of one model call."""
    temperature: float = 1.0
    """Of the sampling, whatever the harness asks for."""
    context_length: int | None = None
    """Stretch or shrink the policy's window, in tokens. A stretched one is for smoke runs: answers get worse."""
    renderer: str | None = None
    """What writes the conversations of a folder that does not say: "chatml" or a family such as "llama-3"."""
    max_calls: int | None = None
    """Model calls of one rollout; the task's own limit where not given."""
    wall_clock: float | None = None
    """Seconds of one run of a harness; the task's own limit where not given. Without one call to the model until then
    (it may be slow to start) it is run again, twice at most."""
    max_concurrency: int = 1
    """Harnesses alive at once."""
    seed: int = 0
    """Of the sampling."""

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_tokens, temperature=self.temperature)

    @property
    def limits(self) -> Mapping[str, float]:
        """The limits set for all tasks, by name."""
        given = {"max_calls": self.max_calls, "wall_clock_s": self.wall_clock}
        return {name: value for name, value in given.items() if value is not None}

    def load_judge(self) -> Judge | None:
        return None if self.judge is None else Judge.parse(self.judge, api_key=os.environ.get(JUDGE_API_KEY, ""))

    def load_policy(self) -> str | Policy | None:
        """Return the policy, loaded where its window or renderer is set here; None where an engine answers.

        Raises:
            PolicyNotBuilt: with the command to run.
        """
        if self.engine is not None:
            return None
        if self.context_length is None and self.renderer is None:
            return self.policy
        loaded: Policy = registry.load("clawgym_env.policy:load_policy")(
            self.policy, cache=cache_dir(), context_length=self.context_length, renderer=self.renderer
        )
        return loaded
