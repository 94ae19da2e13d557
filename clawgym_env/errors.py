"""The error of every boundary a rollout crosses.

One type per boundary, so that blame has an address: the runner turns each into a `StopReason`
(see `clawgym_env.rollout`) and nothing else has to guess who failed. Messages say what was expected,
what was found and what to do next.
"""

from __future__ import annotations

import shlex


class ClawGymError(Exception):
    """Root of every error this project raises on purpose."""


class UsageError(ClawGymError):
    """What was asked for cannot be, on any machine: a name, a value or a file is wrong. Nothing was started."""


class MissingPackage(ClawGymError, ImportError):
    """A package that only some parts need is not installed; the message holds the command. See `clawgym_env.extras`."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"Expected the Python package {package!r}, got none. Run: pip install 'clawgym[{extra}]'")
        self.package = package
        self.extra = extra

    def __reduce__(self) -> tuple[type[MissingPackage], tuple[str, str]]:
        return type(self), (self.package, self.extra)


class TaskError(UsageError):
    """A task folder or task value is malformed; the message names the file."""


class SandboxError(ClawGymError):
    """The sandbox could not be opened, or died while it was needed."""


class HarnessError(ClawGymError):
    """The harness could not be started."""


class HarnessNotInstalled(HarnessError):
    """The harness is not in the install cache; the message holds the command that installs it."""

    def __init__(self, name: str) -> None:
        super().__init__(f"Expected harness {name!r} to be installed. Run: clawgym install {shlex.quote(name)}")
        self.name = name

    def __reduce__(self) -> tuple[type[HarnessNotInstalled], tuple[str]]:
        return type(self), (self.name,)


class HarnessOptionError(HarnessError, UsageError):
    """An option of a harness has a value it does not take."""


class HarnessUnsuitable(HarnessError, UsageError):
    """A task needs what this harness cannot do; nothing was started."""


class ProxyError(ClawGymError):
    """A request could not be understood by the dialect it was sent in (a 4xx for the harness)."""


class ContextOverflow(ClawGymError):
    """A prompt does not fit the policy's window; each dialect has its own words for it."""

    def __init__(self, prompt_tokens: int, context_length: int) -> None:
        super().__init__(f"Expected a prompt of fewer than {context_length} tokens, got {prompt_tokens}.")
        self.prompt_tokens = prompt_tokens
        self.context_length = context_length

    def __reduce__(self) -> tuple[type[ContextOverflow], tuple[int, int]]:
        return type(self), (self.prompt_tokens, self.context_length)


class EngineError(ClawGymError):
    """The inference engine failed to answer."""


class EngineNameError(EngineError, UsageError):
    """An engine or policy is named that cannot be."""


class PolicyNotBuilt(EngineError):
    """A policy that is built on this machine is not in the cache yet; the message holds the command."""

    def __init__(self, name: str) -> None:
        super().__init__(f"Expected policy {name!r} to be built. Run: clawgym policy build {name}")
        self.name = name

    def __reduce__(self) -> tuple[type[PolicyNotBuilt], tuple[str]]:
        return type(self), (self.name,)


class GraderError(ClawGymError):
    """The grader gave no usable score. Never silently a reward of 0."""


class JudgeMissing(GraderError, UsageError):
    """A task is graded by a judge model and none was given; nothing was started."""

    def __init__(self, task_id: str) -> None:
        super().__init__(
            f"Expected a judge for task {task_id!r}, which is graded by a rubric, got none. "
            "Give judge='URL#MODEL' (clawgym: --judge URL#MODEL), the address of any OpenAI-compatible server."
        )
        self.task_id = task_id

    def __reduce__(self) -> tuple[type[JudgeMissing], tuple[str]]:
        return type(self), (self.task_id,)
