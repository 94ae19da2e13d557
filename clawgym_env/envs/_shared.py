"""The keywords of an environment: kept in its `EnvSpec`, in copies of it and in pickles.

Gymnasium deep-copies an environment's spec (wrappers, `check_env`, `make(spec)`), and an engine with threads and
weights cannot be copied. The environments put such a keyword into a handle that every copy of the spec shares.
Invariant: a copy or a pickle of an environment is a new one made with the same keywords, never half a running one.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import FunctionType
from typing import Any, Self

from gymnasium.envs.registration import EnvSpec
from pydantic import BaseModel

_PLAIN = (str, int, float, Path, Enum, BaseModel, FunctionType, type(None))


class Shared:
    """A handle on a live object: deep copies of it hold the same object."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __deepcopy__(self, memo: dict[int, object]) -> Shared:
        return self

    def __repr__(self) -> str:
        return f"Shared({self.value!r})"


def share(value: Any) -> Any:
    """Put everything that is not plain data into a handle; containers are copied."""
    if isinstance(value, (*_PLAIN, Shared)):
        return value
    if isinstance(value, Mapping):
        return {key: share(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(share(item) for item in value)
    return Shared(value)


def unshare(value: Any) -> Any:
    """Undo `share`."""
    if isinstance(value, Shared):
        return value.value
    if isinstance(value, Mapping):
        return {key: unshare(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(unshare(item) for item in value)
    return value


class OwnSpec(EnvSpec):
    """The spec of an environment of ours, which says what to do where it cannot be JSON."""

    def to_json(self) -> str:
        """Return it as JSON, for `EnvSpec.from_json`.

        Raises:
            TypeError: a keyword, of the environment or of a wrapper, is no plain data.
        """
        try:
            return super().to_json()
        except TypeError:
            keywords = [self.kwargs, *(wrapper.kwargs or {} for wrapper in self.additional_wrappers)]
            live = [name for given in keywords for name, value in given.items() if not _is_json(value)]
            raise TypeError(
                f"Expected keywords that are plain data, got objects for {', '.join(live)}. Give names or import paths "
                "instead ('scripted:FILE', 'module:attribute'), or keep the environment by copy.deepcopy or pickle."
            ) from None


def _is_json(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


class SharesLiveKeywords:
    """Mixed into an environment: its spec and itself survive `copy.deepcopy`, and pickling where its keywords do."""

    _spec: EnvSpec | None = None
    _made_with: tuple[tuple[object, ...], dict[str, object]]

    def __new__(cls, *args: object, **keywords: object) -> Self:
        env = super().__new__(cls)
        env._made_with = tuple(map(share, args)), share(keywords)
        return env

    def __reduce__(self) -> tuple[object, ...]:
        return _make_again, (type(self), *self._made_with), {"_spec": self._spec}

    @property
    def spec(self) -> EnvSpec | None:
        """How to make this environment again; live keywords are shared by its copies."""
        return self._spec

    @spec.setter
    def spec(self, spec: EnvSpec | None) -> None:
        if spec is not None:
            spec = copy.copy(spec)
            spec.__class__ = OwnSpec
            spec.kwargs = share(spec.kwargs)
        self._spec = spec


def _make_again(cls: type[object], args: Sequence[object], keywords: Mapping[str, object]) -> object:
    return cls(*args, **keywords)
