"""Which tasks a run trains on and which it only evaluates on. Invariant: no task is in both parts."""

from __future__ import annotations

from collections.abc import Sequence

from clawgym_env.errors import TaskError
from clawgym_env.tasks.loading import BUNDLED, load_tasks
from clawgym_env.tasks.task import Task


def hold_out(spec: str, num_tasks: int) -> tuple[Sequence[Task], Sequence[Task]]:
    """Return training tasks and `num_tasks` held-out ones.

    Args:
        spec: as for `load_tasks`. Bundled families make held-out instances of their own, which share no words, names
            or numbers with those trained on; of any other set the last tasks are held out.

    Raises:
        TaskError: too few tasks, or a `spec` that chooses a split itself.
    """
    tasks = load_tasks(spec)
    name, _, options = spec.partition(":")
    if name == BUNDLED:
        parts = [part.strip() for part in options.split(",") if part.strip()]
        if given := [part for part in parts if part.startswith("split")]:
            raise TaskError(
                f"Expected tasks without a split, since both are used here, got {given[0]!r}. Leave it out."
            )
        kept = [part for part in parts if not part.startswith("size")]
        held_out = f"{name}:{','.join([*kept, 'split=heldout', f'size={num_tasks}'])}"
        return tasks, load_tasks(held_out) if num_tasks else ()
    if len(tasks) <= num_tasks:
        raise TaskError(f"Expected more than the {num_tasks} tasks to hold out, got {len(tasks)} in {spec}.")
    first = len(tasks) - num_tasks
    return tasks[:first], tasks[first:]
