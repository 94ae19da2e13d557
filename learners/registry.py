"""Names to learners: a name, an import path `"package.module:attribute"`, a class, a function or an instance.

Used by scripts and tests. Invariant: nothing is imported until its name is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from clawgym_env.errors import ClawGymError
from clawgym_env.registry import UnknownName, load
from learners.base import Learner

if TYPE_CHECKING:
    from clawgym_env.policy import Policy

LEARNERS: Mapping[str, str] = MappingProxyType(
    {
        "grpo": "learners.grpo:TreeGRPO",
        "rloo": "learners.rloo:TreeRLOO",
        "reinforce": "learners.reinforce:TreeReinforce",
        "ppo": "learners.ppo:TreePPO",
    }
)

ENTRY_POINTS = "clawgym.learners"
"""Under which an installed package names learners of its own; `LEARNERS` goes first."""

LearnerLike: TypeAlias = Union[str, Learner, Callable[..., Learner]]
"""A name, an import path, what makes a learner from a policy, or a learner."""


def make_learner(spec: LearnerLike, policy: Policy | None = None, **settings: Any) -> Learner:
    """Return a learner over `policy`.

    Args:
        spec: a name is one of `LEARNERS`, or one that an installed package has under `ENTRY_POINTS`. An instance is
            returned as it is, and takes neither policy nor settings.
        settings: of the learner's class, as it documents them.

    Raises:
        UnknownName: no such learner; the message lists the known ones.
        ClawGymError: a policy or settings for a learner that is made already, none for one that is not, or something
            that makes no learner.
    """
    if not isinstance(spec, str | type) and isinstance(spec, Learner):
        if policy is not None or settings:
            raise ClawGymError(f"Expected neither policy nor settings beside {spec!r}, which is a learner already.")
        return spec
    if policy is None:
        raise ClawGymError(f"Expected a policy for the learner {spec!r} to train, got none.")
    made = _find(spec)(policy, **settings) if isinstance(spec, str) else spec(policy, **settings)
    if not isinstance(made, Learner):
        raise ClawGymError(f"Expected {spec!r} to make a Learner, got {type(made).__name__}. See learners.base.")
    return made


def _find(spec: str) -> Callable[..., object]:
    found: Callable[..., object]
    if spec in LEARNERS or ":" in spec:
        found = load(LEARNERS.get(spec, spec))
        return found
    theirs = entry_points(group=ENTRY_POINTS)
    if spec not in theirs.names:
        raise UnknownName("learner", spec, (*LEARNERS, *theirs.names))
    found = theirs[spec].load()
    return found
