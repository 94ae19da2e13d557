"""ClawGym: reinforcement learning of language models through real agent harnesses, as Gymnasium environments.

Importing this package registers the `ClawGym-*-v0` ids and nothing else; names are loaded when they are used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from clawgym_env._version import __version__
from clawgym_env.registration import env_id, register_all

if TYPE_CHECKING:
    from clawgym_env.cache import cache_dir
    from clawgym_env.engine.base import Engine, Generation, SamplingParams
    from clawgym_env.envs.call import CallEnv
    from clawgym_env.envs.rollout import RolloutEnv
    from clawgym_env.envs.rollout_vector import RolloutVectorEnv, rollouts
    from clawgym_env.errors import ClawGymError, HarnessNotInstalled, HarnessUnsuitable, PolicyNotBuilt
    from clawgym_env.evaluation.result import EvaluationResult
    from clawgym_env.evaluation.run import evaluate
    from clawgym_env.grading.base import Grade, Grader
    from clawgym_env.harness import HarnessAdapter
    from clawgym_env.pool import RolloutPool, RolloutRequest, ServedPolicy
    from clawgym_env.rollout import Rollout, StopReason
    from clawgym_env.tasks.loading import load_tasks
    from clawgym_env.tasks.task import Limits, McpServer, Task, TaskFile, TaskSet
    from clawgym_env.trace.prefix_tree import PrefixTree, Selection
    from clawgym_env.trace.store import RolloutStore

_HOMES = {
    "cache_dir": "cache",
    "Engine": "engine.base",
    "Generation": "engine.base",
    "SamplingParams": "engine.base",
    "CallEnv": "envs.call",
    "RolloutEnv": "envs.rollout",
    "RolloutVectorEnv": "envs.rollout_vector",
    "rollouts": "envs.rollout_vector",
    "ClawGymError": "errors",
    "HarnessNotInstalled": "errors",
    "HarnessUnsuitable": "errors",
    "PolicyNotBuilt": "errors",
    "EvaluationResult": "evaluation.result",
    "evaluate": "evaluation.run",
    "Grade": "grading.base",
    "Grader": "grading.base",
    "HarnessAdapter": "harness",
    "RolloutPool": "pool",
    "RolloutRequest": "pool",
    "ServedPolicy": "pool",
    "Rollout": "rollout",
    "StopReason": "rollout",
    "Limits": "tasks.task",
    "McpServer": "tasks.task",
    "Task": "tasks.task",
    "TaskFile": "tasks.task",
    "TaskSet": "tasks.task",
    "load_tasks": "tasks.loading",
    "PrefixTree": "trace.prefix_tree",
    "Selection": "trace.prefix_tree",
    "RolloutStore": "trace.store",
}

__all__ = [
    "CallEnv",
    "ClawGymError",
    "Engine",
    "EvaluationResult",
    "Generation",
    "Grade",
    "Grader",
    "HarnessAdapter",
    "HarnessNotInstalled",
    "HarnessUnsuitable",
    "Limits",
    "McpServer",
    "PolicyNotBuilt",
    "PrefixTree",
    "Rollout",
    "RolloutEnv",
    "RolloutPool",
    "RolloutRequest",
    "RolloutStore",
    "RolloutVectorEnv",
    "SamplingParams",
    "Selection",
    "ServedPolicy",
    "StopReason",
    "Task",
    "TaskFile",
    "TaskSet",
    "__version__",
    "cache_dir",
    "env_id",
    "evaluate",
    "load_tasks",
    "rollouts",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__


register_all()
