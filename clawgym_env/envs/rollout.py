"""The rollout clock: a Gymnasium environment in which one step is one whole run of a harness.

`reset` draws a task and a harness and starts nothing; `step(action)` lets the chosen policy answer the harness until
it ends, and grades what it left. Every episode is one step long; the captured prefix tree is in the observation.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsFloat

import gymnasium as gym
import numpy as np
from gymnasium.error import ResetNeeded

from clawgym_env.engine.base import Engine, SamplingParams
from clawgym_env.envs import _face
from clawgym_env.envs._face import Info, Observation
from clawgym_env.envs._shared import SharesLiveKeywords, unshare
from clawgym_env.envs.sampler import Draw
from clawgym_env.envs.service import DEFAULT_TASKS, HarnessLike, Policies, RolloutService, SandboxLike
from clawgym_env.grading.base import GraderLike
from clawgym_env.grading.judge import JudgeLike
from clawgym_env.rollout import Rollout
from clawgym_env.tasks.task import Limits, TasksLike

if TYPE_CHECKING:
    from clawgym_env.policy import Policy
    from clawgym_env.trace.store import RolloutStore


class RolloutEnv(SharesLiveKeywords, gym.Env[Observation, np.int64]):
    """One rollout per step.

    Args:
        tasks: a path in one of the task formats, a name ("bundled:level=1"), or `Task`s.
        harness: a name ("mini", "claude-code?bare"), an import path, an adapter, or several to draw from: all pairs of
            task and harness alike (["mini", "pi"]), or by weight ({"mini": 1, "pi": 2}); see `GroupSampler`.
        policy: an embedded policy: "tiny" (the default), "smollm2", a Hugging Face folder, or a loaded one.
        engine: instead of `policy`: "scripted:FILE", an import path, or a live engine (it is not closed here).
        policies: instead of both: several by name; the action says which one answers.
        sampling: how the policy is sampled, whatever the harness asks for.
        sandbox: "local", an import path, or a backend.
        grader: instead of the task's own: a `Grader`, or a function of the task and a copy of its workspace.
        judge: "URL#MODEL" of any OpenAI-compatible server, or a `Judge`, for tasks that are graded by a rubric.
        limits: budgets that replace the tasks' own.
        run_dir: where every call and rollout is stored (see `RolloutStore`).
        seed: used by the first `reset` that brings none.
        render_mode: "ansi" draws the finished rollout's tree and grade.

    Raises:
        HarnessNotInstalled, PolicyNotBuilt: at the first step, with the command to run.
        JudgeMissing: at the step of a task that needs a judge, with the keyword to give.
    """

    metadata = {  # noqa: RUF012 (Gymnasium's own declaration)
        "render_modes": ["ansi"],
        "render_fps": 1,
    }

    def __init__(
        self,
        *,
        tasks: TasksLike = DEFAULT_TASKS,
        harness: HarnessLike = "mini",
        policy: str | Path | Policy | None = None,
        engine: str | Engine | None = None,
        policies: Policies | None = None,
        sampling: SamplingParams | Mapping[str, float] | None = None,
        sandbox: SandboxLike = "local",
        grader: GraderLike | None = None,
        judge: JudgeLike | None = None,
        limits: Limits | Mapping[str, float] | None = None,
        run_dir: str | Path | None = None,
        seed: int | None = None,
        render_mode: str | None = None,
    ) -> None:
        self._service = RolloutService(
            tasks=unshare(tasks),
            harness=unshare(harness),
            policy=unshare(policy),
            engine=unshare(engine),
            policies=unshare(policies),
            sampling=sampling,
            sandbox=unshare(sandbox),
            grader=unshare(grader),
            judge=unshare(judge),
            limits=limits,
            run_dir=run_dir,
        )
        self._sampler = self._service.sampler()
        self._first_seed = seed
        self.render_mode = render_mode
        self.observation_space = _face.observation_space(len(self._service.harnesses))
        self.action_space = gym.spaces.Discrete(len(self._service.policy_names))
        self._draw: Draw | None = None
        self._rollout: Rollout | None = None

    @property
    def policy_names(self) -> tuple[str, ...]:
        """What the action chooses from, in order."""
        return self._service.policy_names

    @property
    def harness_names(self) -> tuple[str, ...]:
        """What `observation["harness"]` is an index into."""
        return self._service.harness_names

    @property
    def store(self) -> RolloutStore | None:
        """The run directory's store, open from the first step on; None without a run directory."""
        return self._service.store

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        """Draw the next task and harness.

        Args:
            seed: starts the order of tasks and all sampling seeds over.
            options: `task_id` and `harness` replace what would be drawn.
        """
        options = _face.known_options(options, "task_id", "harness")
        if seed is None and self._sampler.seed is None:
            seed = self._first_seed
        super().reset(seed=seed)
        if seed is not None or self._sampler.seed is None:
            self._sampler.reseed(seed if seed is not None else int(self.np_random.integers(2**31)))
        self._draw = self._sampler.draw(options.get("task_id"), options.get("harness"))
        self._rollout = None
        return _face.observe(self._draw), _face.reset_info(self._draw, self._service.harnesses[self._draw.harness])

    def choose_harness(self, harness: int) -> None:
        """Let harness number `harness` do the drawn task, in place of the drawn one; see `wrappers.HarnessAction`.

        Raises:
            ResetNeeded: no episode has begun, or it is over.
            ValueError: no such harness.
        """
        self._draw = self._pending().with_harness(self._service.check_harness(harness))

    def step(self, action: np.int64 | int) -> tuple[Observation, SupportsFloat, bool, bool, Info]:
        """Run the drawn task to its end with policy number `action`.

        Raises:
            ResetNeeded: the episode is over (it is one step long), or none has begun.
            HarnessNotInstalled, PolicyNotBuilt: with the command to run; the episode goes on.
        """
        draw = self._pending()
        if not self.action_space.contains(action):
            raise ValueError(f"Expected an action of {self.action_space}, got {action!r}.")
        rollout = self._service.run([self._service.request(draw, policy=int(action))])[0]
        self._rollout = rollout
        terminated, truncated = _face.ended(rollout)
        observation = _face.observe(draw, rollout)
        return observation, rollout.reward, terminated, truncated, _face.final_info(rollout)

    def render(self) -> str | None:
        """Return the finished rollout as text ("ansi"), "" before there is one, None without a render mode."""
        return _face.draw_rollout(self._rollout) if self.render_mode == "ansi" else None

    def close(self) -> None:
        """End everything this environment started. Idempotent."""
        self._service.close()

    def _pending(self) -> Draw:
        if self._draw is None or self._rollout is not None:
            raise ResetNeeded("Expected reset() before step(): an episode is one step long.")
        return self._draw
