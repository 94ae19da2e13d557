"""The named policies that an action chooses from, each with its engine.

Made from the keywords of an environment (`RolloutService`) or of a wrapper (`RouteCalls`). Invariant: making the arms
loads nothing; an engine is made when its arm is first asked for, and closed here only if it was made here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, Union

from clawgym_env import registry
from clawgym_env.cache import cache_dir
from clawgym_env.engine.base import Engine, SamplingParams
from clawgym_env.pool import ServedPolicy

if TYPE_CHECKING:
    from clawgym_env.policy import Policy

PolicyLike: TypeAlias = Union[str, Path, "Policy", Engine]
"""An embedded policy ("tiny", a Hugging Face folder), an engine ("scripted:FILE", an import path), or either, live."""
Policies: TypeAlias = Union[Mapping[str, PolicyLike], Sequence["str | ServedPolicy"]]
"""The arms of an action, by name; a `ServedPolicy` brings sampling of its own."""

DEFAULT_POLICY = "tiny"


class Arms:
    """Policies by number, in the order given."""

    def __init__(
        self,
        policies: Policies | None = None,
        *,
        policy: str | Path | Policy | None = None,
        engine: str | Engine | None = None,
        sampling: SamplingParams = SamplingParams(),
    ) -> None:
        """Name the arms: several by `policies`, or one by `policy` or `engine`; "tiny" where none is given.

        Args:
            sampling: of every arm that brings none of its own.

        Raises:
            ValueError: more than one of the three is given.
        """
        given = [name for name, value in (("policy", policy), ("engine", engine), ("policies", policies)) if value]
        if len(given) > 1:
            raise ValueError(f"Expected one of policy, engine and policies, got {' and '.join(given)}.")
        self._arms = _arms(policy, engine, policies)
        self._sampling = sampling
        self._served: dict[int, ServedPolicy] = {}
        self._own: list[Engine] = []

    @property
    def names(self) -> tuple[str, ...]:
        """The names, in order."""
        return tuple(name for name, _ in self._arms)

    def served(self, number: int = 0) -> ServedPolicy:
        """Return an arm with its engine, loading it at the first use.

        Raises:
            PolicyNotBuilt: with the command to run.
        """
        if number not in self._served:
            name, make = self._arms[number]
            made = make()
            if isinstance(made, ServedPolicy):
                self._served[number] = made
            else:
                engine, own = made
                if own:
                    self._own.append(engine)
                self._served[number] = ServedPolicy(name, engine, self._sampling)
        return self._served[number]

    async def close(self) -> None:
        """Close the engines made here. Idempotent."""
        engines, self._own = self._own, []
        self._served.clear()
        for engine in engines:
            await engine.close()

    @property
    def open(self) -> bool:
        """Whether there is an engine to close."""
        return bool(self._own)


_Arm: TypeAlias = tuple[str, Callable[[], "ServedPolicy | tuple[Engine, bool]"]]
"""A name, and what makes its engine; True where the arms have to close it."""


def _arms(
    policy: str | Path | Policy | None, engine: str | Engine | None, policies: Policies | None
) -> tuple[_Arm, ...]:
    if engine is not None:
        return (_arm(engine if isinstance(engine, str) else "policy", engine),)
    if policies:
        if isinstance(policies, Mapping):
            return tuple(_arm(name, spec) for name, spec in policies.items())
        return tuple(_arm(spec, spec) if isinstance(spec, str) else _ready(spec) for spec in policies)
    policy = policy or DEFAULT_POLICY
    return (_arm(str(policy) if isinstance(policy, str | Path) else "policy", policy, embedded=True),)


def _ready(served: ServedPolicy) -> _Arm:
    return served.name, lambda: served


def _arm(name: str, spec: PolicyLike, *, embedded: bool = False) -> _Arm:
    def make() -> tuple[Engine, bool]:
        if isinstance(spec, Engine):
            return spec, False
        if isinstance(spec, str) and ":" in spec and not embedded:
            return registry.engine(spec), True
        return registry.policy_engine(spec, cache_dir()), True

    return name, make
