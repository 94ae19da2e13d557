"""Many rollouts per step: the vector form of `RolloutEnv`, on one event loop instead of one process each.

Neighbours of `group_size` share task and harness, which is what group-relative learners compare. Invariant: what
sub-environment i shows equals what a single `RolloutEnv` with the same draw would show.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from clawgym_env.engine.base import Engine, SamplingParams
from clawgym_env.envs import _face
from clawgym_env.envs._face import Info, Observation
from clawgym_env.envs._shared import SharesLiveKeywords, unshare
from clawgym_env.envs.rollout import RolloutEnv
from clawgym_env.envs.sampler import Draw
from clawgym_env.envs.service import DEFAULT_TASKS, HarnessLike, Policies, RolloutService, SandboxLike
from clawgym_env.grading.base import GraderLike
from clawgym_env.grading.judge import JudgeLike
from clawgym_env.messages import Json
from clawgym_env.pool import RolloutRequest
from clawgym_env.rollout import Rollout
from clawgym_env.tasks.task import Limits, TasksLike

if TYPE_CHECKING:
    from clawgym_env.policy import Policy
    from clawgym_env.trace.store import RolloutStore

BatchedObservation = dict[str, Any]
DEFAULT_CONCURRENCY = 16


class RolloutVectorEnv(
    SharesLiveKeywords, gym.vector.VectorEnv[BatchedObservation, npt.NDArray[np.int64], npt.NDArray[Any]]
):
    """`num_envs` rollouts per step; keywords beyond these as in `RolloutEnv`.

    Args:
        num_envs: rollouts per step.
        group_size: neighbours that share task, harness and group id; divides `num_envs`.
        max_concurrency: harnesses alive at once (default: `num_envs`, at most 16).
        autoreset_mode: DISABLED (the loop is `reset(); step()`) or SAME_STEP (finished trees in `infos["final_obs"]`).
    """

    metadata = {  # noqa: RUF012 (Gymnasium's own declaration)
        **RolloutEnv.metadata,
        "autoreset_mode": AutoresetMode.DISABLED,
    }

    def __init__(
        self,
        num_envs: int = 1,
        *,
        group_size: int = 1,
        max_concurrency: int | None = None,
        autoreset_mode: AutoresetMode | str = AutoresetMode.DISABLED,
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
        if num_envs < 1 or group_size < 1 or num_envs % group_size:
            raise ValueError(
                f"Expected num_envs to be a multiple of group_size, got num_envs={num_envs}, group_size={group_size}."
            )
        self._autoreset = _autoreset_mode(autoreset_mode)
        self.metadata = {**type(self).metadata, "autoreset_mode": self._autoreset}
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
            max_concurrency=max_concurrency if max_concurrency is not None else min(num_envs, DEFAULT_CONCURRENCY),
        )
        self._sampler = self._service.sampler()
        self._first_seed = seed
        self.num_envs = num_envs
        self.group_size = group_size
        self.render_mode = render_mode
        self.single_observation_space = _face.observation_space(len(self._service.harnesses))
        self.single_action_space = gym.spaces.Discrete(len(self._service.policy_names))
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._draws: list[Draw | None] = [None] * num_envs
        self._rollouts: list[Rollout | None] = [None] * num_envs

    @property
    def policy_names(self) -> tuple[str, ...]:
        """What an action chooses from, in order."""
        return self._service.policy_names

    @property
    def harness_names(self) -> tuple[str, ...]:
        """What `observation["harness"]` holds indices into."""
        return self._service.harness_names

    @property
    def store(self) -> RolloutStore | None:
        """The run directory's store, open from the first step on; None without a run directory."""
        return self._service.store

    @property
    def run_dir(self) -> Path | None:
        """Where every call and rollout is stored."""
        return self._service.run_dir

    def open_store(self) -> RolloutStore | None:
        """Return the run directory's store, opened before the first step; None without a run directory."""
        return self._service.open_store()

    def state_dict(self) -> dict[str, Json]:
        """Return where the draws of tasks and seeds stand, for `load_state_dict`."""
        return {"seed": self._sampler.seed, "position": self._sampler.position}

    def load_state_dict(self, state: Mapping[str, Json]) -> None:
        """Go on with an interrupted run of the same settings, in its run directory.

        The next groups are those that would have come, under the same ids; rollouts of theirs that the store holds
        finished are loaded instead of run.

        Raises:
            RuntimeError: rollouts ran already.
        """
        self._service.reuse_finished()
        seed, position = state["seed"], state["position"]
        if isinstance(seed, int) and isinstance(position, int):
            self._sampler.reseed(seed)
            self._sampler.position = position

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[BatchedObservation, Info]:
        """Draw a task and a harness for every group.

        Args:
            seed: starts the order of tasks and all sampling seeds over.
            options: `task_ids` and `harnesses` (names), one per group (None draws), replace what would be drawn;
                `reset_mask`, boolean, shape [num_envs], resets whole groups only.
        """
        options = _face.known_options(options, "reset_mask", "task_ids", "harnesses")
        mask = self._mask(options.get("reset_mask"))
        if seed is None and self._sampler.seed is None:
            seed = self._first_seed
        super().reset(seed=seed)
        if seed is not None or self._sampler.seed is None:
            self._sampler.reseed(seed if seed is not None else int(self.np_random.integers(2**31)))
        self._draw_groups(mask, options.get("task_ids"), options.get("harnesses"))
        infos: Info = {}
        for i, draw in enumerate(self._drawn()):
            if mask[i]:
                infos = self._add_info(infos, _face.reset_info(draw, self._service.harnesses[draw.harness]), i)
        return self._observations(), infos

    def choose_harnesses(self, harnesses: npt.NDArray[np.int64] | Sequence[int]) -> None:
        """Let harness number `harnesses[i]` do the task of sub-environment i, in place of the drawn one.

        See `wrappers.vector.HarnessAction`.

        Raises:
            ResetNeeded: an episode has not begun, or is over.
            ValueError: no such harness, or two in one group.
        """
        chosen = np.asarray(harnesses)
        if chosen.shape != (self.num_envs,) or chosen.dtype.kind not in "iu":
            raise ValueError(f"Expected harnesses to be {self.num_envs} integers, got {harnesses!r}.")
        groups = chosen.reshape(-1, self.group_size)
        if (groups != groups[:, :1]).any():
            raise ValueError(f"Expected one harness for each group of {self.group_size}, got {chosen.tolist()}.")
        draws = self._pending()
        indices = [self._service.check_harness(int(harness)) for harness in chosen]
        self._draws = [draw.with_harness(harness) for draw, harness in zip(draws, indices, strict=True)]

    def step(
        self, actions: npt.NDArray[np.int64] | Sequence[int]
    ) -> tuple[BatchedObservation, npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any], Info]:
        """Run all drawn tasks to their end, sub-environment i with policy number `actions[i]`.

        Raises:
            ResetNeeded: a sub-environment's episode is over (DISABLED), or none has begun.
            HarnessNotInstalled, PolicyNotBuilt: with the command to run.
        """
        actions = np.asarray(actions)
        if not self.action_space.contains(actions):
            raise ValueError(f"Expected actions of {self.action_space}, got {actions!r}.")
        draws = self._pending()
        rollouts = self._service.run([self._request(draws, i, int(action)) for i, action in enumerate(actions)])
        self._rollouts = list(rollouts)
        ends = [_face.ended(rollout) for rollout in rollouts]
        infos: Info = {}
        if self._autoreset is AutoresetMode.SAME_STEP:
            finals = [self._observation(i) for i in range(self.num_envs)]
            self._draw_groups(np.ones(self.num_envs, dtype=bool))
            for i, (rollout, draw) in enumerate(zip(rollouts, self._drawn(), strict=True)):
                final = {"final_obs": finals[i], "final_info": _face.final_info(rollout)}
                infos = self._add_info(infos, final, i)
                infos = self._add_info(infos, _face.reset_info(draw, self._service.harnesses[draw.harness]), i)
        else:
            for i, rollout in enumerate(rollouts):
                infos = self._add_info(infos, _face.final_info(rollout), i)
        return (
            self._observations(),
            np.array([rollout.reward for rollout in rollouts], dtype=np.float64),
            np.array([terminated for terminated, _ in ends], dtype=np.bool_),
            np.array([truncated for _, truncated in ends], dtype=np.bool_),
            infos,
        )

    def as_completed(
        self,
        total: int | None,
        *,
        action: int = 0,
        skip: Container[str] = (),
        begun: Callable[[str], None] | None = None,
    ) -> Generator[Rollout, None, None]:
        """Yield `total` rollouts of freshly drawn groups as they finish, `max_concurrency` always running.

        Weights may be updated between items: running rollouts go on under the new ones. The groups come after those
        `reset` has drawn, and neither touch nor need the episodes of `step`.

        Args:
            total: how many; None goes on until the iteration is ended.
            skip: ids of groups that are drawn but not run, and do not count.
            begun: called with a group's id when its first rollout starts, on the thread that the rollouts run on.

        Raises:
            ValueError: `total` is not a multiple of `group_size`.
        """
        if total is not None and total % self.group_size:
            raise ValueError(
                f"Expected total to be a multiple of group_size, got total={total}, group_size={self.group_size}."
            )
        if self._sampler.seed is None:
            self.reset()
        num_groups = None if total is None else total // self.group_size
        return self._service.as_completed(self._requests(num_groups, action, skip, begun))

    def render(self) -> tuple[str, ...] | None:
        """Return every finished rollout as text ("ansi"), None without a render mode."""
        return tuple(map(_face.draw_rollout, self._rollouts)) if self.render_mode == "ansi" else None

    def close_extras(self, **kwargs: Any) -> None:
        """End everything this environment started."""
        self._service.close()

    def _requests(
        self, num_groups: int | None, action: int, skip: Container[str], begun: Callable[[str], None] | None
    ) -> Iterator[RolloutRequest]:
        draws = iter(self._sampler.draw, None)
        for draw in itertools.islice((draw for draw in draws if draw.group_id not in skip), num_groups):
            if begun is not None:
                begun(draw.group_id)
            for index in range(self.group_size):
                yield self._service.request(draw, policy=action, index=index)

    def _request(self, draws: Sequence[Draw], i: int, action: int) -> RolloutRequest:
        return self._service.request(draws[i], policy=action, index=i % self.group_size)

    def _draw_groups(
        self,
        mask: npt.NDArray[np.bool_],
        task_ids: Sequence[str | None] | None = None,
        harnesses: Sequence[str | None] | None = None,
    ) -> None:
        num_groups = self.num_envs // self.group_size
        for name, given in (("task_ids", task_ids), ("harnesses", harnesses)):
            if given is not None and len(given) != num_groups:
                raise ValueError(f"Expected {name} for {num_groups} groups, got {len(given)}.")
        for group in range(num_groups):
            members = slice(group * self.group_size, (group + 1) * self.group_size)
            if mask[members.start]:
                draw = self._sampler.draw(
                    None if task_ids is None else task_ids[group], None if harnesses is None else harnesses[group]
                )
                self._draws[members] = [draw] * self.group_size
                self._rollouts[members] = [None] * self.group_size

    def _drawn(self) -> list[Draw]:
        draws = [draw for draw in self._draws if draw is not None]
        if len(draws) < self.num_envs:
            raise ResetNeeded("Expected every sub-environment to be reset once before it is used. Call reset().")
        return draws

    def _pending(self) -> list[Draw]:
        draws = self._drawn()
        if any(rollout is not None for rollout in self._rollouts):
            raise ResetNeeded("Expected reset() before step(): with autoreset DISABLED an episode is one step long.")
        return draws

    def _mask(self, mask: npt.NDArray[np.bool_] | None) -> npt.NDArray[np.bool_]:
        if mask is None:
            return np.ones(self.num_envs, dtype=bool)
        if mask.shape != (self.num_envs,) or mask.dtype != np.bool_ or not mask.any():
            raise ValueError(f"Expected reset_mask to be {self.num_envs} booleans, one of them True, got {mask!r}.")
        groups = mask.reshape(-1, self.group_size)
        if (groups.any(axis=1) != groups.all(axis=1)).any():
            raise ValueError(f"Expected reset_mask to cover whole groups of {self.group_size}, got {mask!r}.")
        return mask

    def _observation(self, i: int) -> Observation:
        return _face.observe(self._drawn()[i], self._rollouts[i])

    def _observations(self) -> BatchedObservation:
        seen = [_face.observe(draw, rollout) for draw, rollout in zip(self._drawn(), self._rollouts, strict=True)]
        return {
            "instruction": tuple(one["instruction"] for one in seen),
            "response": tuple(one["response"] for one in seen),
            "harness": np.array([one["harness"] for one in seen], dtype=np.int64),
            "trace": tuple(one["trace"] for one in seen),
        }


def rollouts(infos: Mapping[str, Any]) -> list[Rollout]:
    """Return the finished rollouts in the infos of a step, in order, whatever the autoreset mode.

    The info of a single environment's step is accepted too.
    """
    final = infos.get("final_info", infos)
    found = final.get("rollout")
    if found is None:
        return []
    if isinstance(found, Rollout):
        return [found]
    return [rollout for rollout in found if rollout is not None]


def _autoreset_mode(mode: AutoresetMode | str) -> AutoresetMode:
    names = {mode.name: mode for mode in AutoresetMode} | {mode.value: mode for mode in AutoresetMode}
    known = names.get(mode) if isinstance(mode, str) else mode
    if known is None:
        raise ValueError(f"Expected autoreset_mode DISABLED or SAME_STEP, got {mode!r}.")
    if known is AutoresetMode.NEXT_STEP:
        raise ValueError(
            "Expected autoreset_mode DISABLED or SAME_STEP, got NEXT_STEP: an episode is one step long, so every "
            "second step would do nothing but reset."
        )
    return known
