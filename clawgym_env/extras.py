"""Packages that only some parts need: which extra of setup.cfg brings each.

Asked where such a package is about to be imported. Invariant: `import clawgym_env` needs none of
them, and where one is missing its user reads the exact command instead of a ModuleNotFoundError.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.util import find_spec
from types import MappingProxyType

from clawgym_env.errors import MissingPackage

EXTRA_OF: Mapping[str, str] = MappingProxyType(
    {
        "torch": "train",
        "transformers": "train",
        "safetensors": "train",
        "tensorboard": "train",
        "matplotlib": "train",
        "gguf": "cpu",
        "peft": "lora",
        "docker": "docker",
        "pyarrow": "parquet",
        "vllm": "vllm",
        "stable_baselines3": "sb3",
    }
)
"""Extras by the name that is imported."""


def require_package(*packages: str) -> None:
    """Refuse to go on without packages of `EXTRA_OF`; nothing is imported.

    Raises:
        MissingPackage: for the first that is not there, with the command to run.
    """
    for package in packages:
        if sys.modules.get(package) is None and not is_installed(package):
            raise MissingPackage(package, EXTRA_OF[package])


def is_installed(package: str) -> bool:
    """Whether a package could be imported."""
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):  # a finder refuses, or a module is half there
        return False
