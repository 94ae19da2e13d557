"""The call clock: a Gymnasium environment in which a step is one model call of a harness, and the caller is the model.

`reset` draws a task and a harness, starts them in a sandbox and waits for the first call; `step(action)` replies to the
call that waits and goes on to the next one, or to the end and the grade. For reading along, scripted policies, routing
and plain-Gymnasium learners; training at scale is what the rollout clock (`envs.rollout`) is for. Invariant: what runs
between two steps is ended by `reset` and `close`, sandbox and all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, SupportsFloat, TypeAlias, Union, cast

import gymnasium as gym
import numpy as np
from gymnasium.error import ResetNeeded

from clawgym_env._loop import shared_loop
from clawgym_env.engine.base import Engine, Generation, SamplingParams, TokenIds
from clawgym_env.engine.caller import DEFAULT_WINDOW, AskedCall, CallerEngine
from clawgym_env.envs import _face
from clawgym_env.envs._face import MAX_TEXT, Info
from clawgym_env.envs._shared import SharesLiveKeywords, unshare
from clawgym_env.envs.call_episode import CallEpisode
from clawgym_env.envs.sampler import Draw
from clawgym_env.envs.service import DEFAULT_TASKS, HarnessLike, RolloutService, SandboxLike
from clawgym_env.errors import ClawGymError
from clawgym_env.grading.base import GraderLike
from clawgym_env.grading.judge import JudgeLike
from clawgym_env.policy import BYTES, PolicyText
from clawgym_env.pool import ServedPolicy
from clawgym_env.rollout import Rollout
from clawgym_env.spaces import TokenIds as TokenIdsSpace
from clawgym_env.spaces import Unicode
from clawgym_env.tasks.task import Limits, TasksLike

if TYPE_CHECKING:
    from clawgym_env.trace.store import RolloutStore

Mode = Literal["text", "token_ids"]
TextOrIds: TypeAlias = Union[str, TokenIds]
CALLER = "caller"
"""The policy's name in rollouts."""
DEFAULT_MAX_TOKENS = 1 << 15


class CallEnv(SharesLiveKeywords, gym.Env[TextOrIds, TextOrIds]):
    """One model call per step.

    The observation is the prompt as the policy would read it, special tokens included; at the end it is the harness's
    visible answer. The action is the completion as the policy would have sampled it: tool calls are written in the
    policy's own form, and what closes the turn may be left out. The reward is 0 until the last step, then the grade.
    Calls that wait at the same time, of sub-agents, come one at a time in the order in which they were asked. The
    harness's clock runs while the caller thinks: `limits.wall_clock_s` ends an episode that takes longer.

    Args:
        tasks, harness, sandbox, grader, judge, limits, run_dir, seed: as in `RolloutEnv`. `limits.max_calls` bounds an
            episode and grades it; Gymnasium's `TimeLimit` would cut it before the grade.
        policy: whose tokens and template prompts are written in: "bytes" (ChatML over 256 bytes, needs no file),
            "tiny", "smollm2", or a Hugging Face folder. No weights are loaded.
        context_length: tokens of the caller's window, which the harness is told.
        max_tokens: bound on the tokens of one reply, which the harness is told too.
        action_mode, observation_mode: "text", or "token_ids" for vectors of ids (then the policy is loaded here).
        render_mode: "ansi" draws the tree so far and the call that waits, at the end the tree and the grade.

    Raises:
        HarnessNotInstalled, PolicyNotBuilt, HarnessUnsuitable, JudgeMissing: at `reset`, which starts the harness, with
            what to do.
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
        policy: str | Path | PolicyText = BYTES,
        context_length: int = DEFAULT_WINDOW,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        action_mode: Mode = "text",
        observation_mode: Mode = "text",
        sandbox: SandboxLike = "local",
        grader: GraderLike | None = None,
        judge: JudgeLike | None = None,
        limits: Limits | Mapping[str, float] | None = None,
        run_dir: str | Path | None = None,
        seed: int | None = None,
        render_mode: str | None = None,
    ) -> None:
        self._engine = CallerEngine(unshare(policy), context_length=context_length)
        served = ServedPolicy(CALLER, self._engine, SamplingParams(max_tokens=max_tokens))
        self._service = RolloutService(
            tasks=unshare(tasks),
            harness=unshare(harness),
            policies=[served],
            sandbox=unshare(sandbox),
            grader=unshare(grader),
            judge=unshare(judge),
            limits=limits,
            run_dir=run_dir,
        )
        self._sampler = self._service.sampler()
        self._first_seed = seed
        self._observes_ids = _is_ids(observation_mode, "observation_mode")
        self.render_mode = render_mode
        self.observation_space = self._space(self._observes_ids)
        self.action_space = self._space(_is_ids(action_mode, "action_mode"))
        self._draw: Draw | None = None
        self._episode: CallEpisode | None = None
        self._rollout: Rollout | None = None
        self._sampled: tuple[TextOrIds, Generation | ClawGymError] | None = None
        self._compared: list[Engine] = []
        """Engines that are known to read and write the policy's tokens."""

    @property
    def store(self) -> RolloutStore | None:
        """The run directory's store, open from the first reset on; None without a run directory."""
        return self._service.store

    @property
    def pending(self) -> AskedCall | None:
        """The call that waits for the next step; None where no episode runs."""
        return None if self._episode is None else self._episode.asked

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[TextOrIds, Info]:
        """End what runs, draw the next task and harness, start them and wait for the first model call.

        A harness that ends without asking the model for anything has an empty observation and no `call_id`; the next
        step, whatever its action, tells how it ended.

        Args:
            seed: starts the order of tasks over.
            options: `task_id` and `harness` replace what would be drawn.

        Raises:
            HarnessNotInstalled, PolicyNotBuilt: with the command to run.
        """
        options = _face.known_options(options, "task_id", "harness")
        self._end()
        if seed is None and self._sampler.seed is None:
            seed = self._first_seed
        super().reset(seed=seed)
        if seed is not None or self._sampler.seed is None:
            self._sampler.reseed(seed if seed is not None else int(self.np_random.integers(2**31)))
        self._draw = draw = self._sampler.draw(options.get("task_id"), options.get("harness"))
        _ = self._engine.text  # A policy that is not built shows here.
        asked_before = self._engine.num_asked
        request = dataclasses.replace(
            self._service.request(draw), repeatable=lambda: self._engine.num_asked == asked_before
        )
        self._episode = shared_loop().run(CallEpisode.begin(self._engine, self._service.running([request])))
        return self._observe(self._episode.asked), self._info(draw, self._episode.asked)

    def step(self, action: TextOrIds) -> tuple[TextOrIds, SupportsFloat, bool, bool, Info]:
        """Reply to the call that waits, then wait for the next one or for the end.

        A reply comes too late where the rollout has ended meanwhile, or where the harness has given the call up: it is
        in no tree then.

        Raises:
            ResetNeeded: the episode is over, or none has begun.
            ValueError: the action is none; the call still waits.
        """
        episode, draw = self._episode, self._draw
        if episode is None or draw is None:
            raise ResetNeeded("Expected reset() before step(): no model call waits for a reply.")
        if not self.action_space.contains(action):
            raise ValueError(f"Expected an action of {self.action_space}, got {_described(action)}.")
        if episode.asked is not None:
            outcome = self._outcome(action, episode.asked)
            try:
                shared_loop().run(episode.answer(outcome))
            except BaseException:  # Ctrl-C, which may have come before the episode could see to its own end
                self._end()
                raise
        rollout = episode.rollout
        if rollout is None:
            return self._observe(episode.asked), 0.0, False, False, self._info(draw, episode.asked)
        self._episode, self._rollout = None, rollout
        terminated, truncated = _face.ended(rollout)
        return self._final(rollout), rollout.reward, terminated, truncated, _face.final_info(rollout)

    def sample(self, engine: Engine, sampling: SamplingParams = SamplingParams()) -> TextOrIds:
        """Let an engine sample the reply to the call that waits, and return it as an action.

        `step` with this very action records the tokens and log-probabilities exactly as they were sampled, so that the
        call can be trained on. An engine that fails fails in that step: the call is asked once more, then the episode
        ends as `engine_error`.

        Args:
            sampling: how it samples; seed and budget are the call's.

        Raises:
            ResetNeeded: no episode runs.
            ValueError: the engine reads and writes other tokens than the policy of this environment, or has a smaller
                window than the harness was told.
        """
        if self._episode is None:
            raise ResetNeeded("Expected reset() before sample(): no model call waits for a reply.")
        self._compare(engine)
        outcome = shared_loop().run(self._episode.sample(engine, sampling))
        ids = outcome.token_ids if isinstance(outcome, Generation) else np.empty(0, dtype=np.int32)
        as_ids = isinstance(self.action_space, TokenIdsSpace)
        action = ids if as_ids else self._engine.text.tokenizer.decode(ids)
        self._sampled = action, outcome
        return action

    def render(self) -> str | None:
        """Return the tree as text ("ansi"), "" before there is one, None without a render mode."""
        if self.render_mode != "ansi":
            return None
        if self._episode is not None:
            return shared_loop().run(self._episode.outline())
        return _face.draw_rollout(self._rollout)

    def close(self) -> None:
        """End everything this environment started. Idempotent."""
        self._end()
        self._service.close()

    def _end(self) -> None:
        episode, self._episode = self._episode, None
        self._rollout = self._sampled = None
        if episode is not None:
            shared_loop().run(episode.end())

    def _space(self, ids: bool) -> gym.Space[TextOrIds]:
        space: gym.Space[Any] = Unicode(MAX_TEXT)
        if ids:
            space = TokenIdsSpace(self._engine.text.tokenizer.vocab_size, self._engine.context_length)
        return cast("gym.Space[TextOrIds]", space)

    def _outcome(self, action: TextOrIds, asked: AskedCall) -> Generation | ClawGymError:
        sampled, self._sampled = self._sampled, None
        if sampled is not None and sampled[0] is action:
            return sampled[1]
        return self._engine.generation(action, asked.sampling)

    def _observe(self, asked: AskedCall | None) -> TextOrIds:
        ids = np.empty(0, dtype=np.int32) if asked is None else asked.prompt_token_ids
        return ids.copy() if self._observes_ids else self._engine.text.tokenizer.decode(ids)[-MAX_TEXT:]

    def _final(self, rollout: Rollout) -> TextOrIds:
        if not self._observes_ids:
            return rollout.response[:MAX_TEXT]
        ids = self._engine.text.tokenizer.encode_literal(rollout.response)
        return np.array(ids[: self._engine.context_length], dtype=np.int32)

    def _info(self, draw: Draw, asked: AskedCall | None) -> Info:
        call = {
            "call_id": None if asked is None else asked.call.id,
            "parent_id": None if asked is None else asked.call.parent_id,
            "kind": None if asked is None else asked.kind,
        }
        return _face.reset_info(draw, self._service.harnesses[draw.harness]) | call

    def _compare(self, engine: Engine) -> None:
        if any(engine is known for known in self._compared):
            return
        from clawgym_env.rendering import same_tokens

        if not same_tokens(self._engine.renderer, engine.renderer):
            raise ValueError(
                f"Expected an engine that reads and writes the tokens of {self._engine.text.name!r}, got another. "
                "Make the environment with policy= the one the engine serves."
            )
        if engine.context_length < self._engine.context_length:
            raise ValueError(
                f"Expected an engine with a window of {self._engine.context_length} tokens, got "
                f"{engine.context_length}. Make the environment with context_length={engine.context_length}."
            )
        self._compared.append(engine)


def _is_ids(mode: str, name: str) -> bool:
    if mode not in ("text", "token_ids"):
        raise ValueError(f"Expected {name} to be 'text' or 'token_ids', got {mode!r}.")
    return mode == "token_ids"


def _described(action: object) -> str:
    if isinstance(action, str):
        return f"{len(action)} characters"
    if isinstance(action, np.ndarray):
        return f"an array of shape {action.shape} and type {action.dtype}"
    return type(action).__name__
