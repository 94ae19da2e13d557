"""Tasks: what the policy is asked to do, where they come from."""

from clawgym_env.tasks.clawgym_format import load_clawgym, save_clawgym
from clawgym_env.tasks.loading import load_tasks
from clawgym_env.tasks.task import Limits, McpServer, SolutionStep, Task, TaskFile, TaskSet, TasksLike, Turn

__all__ = [
    "Limits",
    "McpServer",
    "SolutionStep",
    "Task",
    "TaskFile",
    "TaskSet",
    "TasksLike",
    "Turn",
    "load_clawgym",
    "load_tasks",
    "save_clawgym",
]
