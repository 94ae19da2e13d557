"""What goes wrong in a command, as one line and an exit code.

Every line says what was expected, what was found and what to do next. Invariant: an exception that nobody raised on
purpose is not dressed up as one: it keeps its traceback.
"""

from __future__ import annotations

import pydantic

from clawgym_env.errors import ClawGymError, UsageError

FAILED, USAGE = 1, 2
_NOT_FOUND = (FileNotFoundError, NotADirectoryError, IsADirectoryError, FileExistsError)


def on_purpose(error: Exception) -> bool:
    """Whether an error was raised to be read: ours, the machine's, or a `ValueError` that says what was expected."""
    if isinstance(error, ValueError) and not isinstance(error, ClawGymError | OSError | pydantic.ValidationError):
        return str(error).startswith("Expected")
    return isinstance(error, ClawGymError | OSError | ImportError | pydantic.ValidationError)


def exit_code(error: BaseException) -> int:
    """Return 2 where the command line asks for what cannot be, on any machine; 1 where it failed on this one."""
    wrong = isinstance(error, UsageError | ValueError) or (isinstance(error, _NOT_FOUND) and error.filename is not None)
    return USAGE if wrong else FAILED


def line(error: BaseException) -> str:
    """Return what went wrong as one line."""
    if isinstance(error, pydantic.ValidationError):
        text = _invalid(error)
    elif isinstance(error, OSError) and not isinstance(error, ClawGymError):
        text = _refused(error)
    elif isinstance(error, ImportError) and not isinstance(error, ClawGymError):
        text = f"Expected to import what this needs, got: {error}. Look at your installation with: clawgym doctor"
    else:
        text = str(error)
    return " ".join(text.split())


def _invalid(error: pydantic.ValidationError) -> str:
    """Return the first of the values that a model refused; options of the command line are named as on it."""
    first, *others = error.errors(include_url=False, include_context=False)
    name = ".".join(map(str, first["loc"])) or error.title
    more = f" {len(others)} more are wrong." if others else ""
    return f"Expected {name} that holds: {first['msg']}; got {first['input']!r}.{more} See the command's --help."


def _refused(error: OSError) -> str:
    if error.filename is None:
        return f"Expected this machine to do it, got: {error}. Look at it with: clawgym doctor"
    return (
        f"Expected to use {str(error.filename)!r}, got: {error.strerror}. Choose another, or look at its permissions."
    )
