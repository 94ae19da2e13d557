"""The folder a Dockerfile's image starts in, found without building it.

Used by the Harbor loader, since a task's workspace must be known before its image exists.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath

_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::([-+])([^}]*))?\})")
_ASSIGNMENT = re.compile(r"""(\w+)=("(?:[^"\\]|\\.)*"|'[^']*'|\S*)""")


def working_directory(dockerfile: str) -> str | None:
    """Return the last stage's WORKDIR; None where it sets none, so that the base image decides.

    ARG and ENV are followed, with their defaults; a stage made `FROM` an earlier one starts in that one's folder.
    """
    stages: dict[str, tuple[PurePosixPath | None, dict[str, str]]] = {}
    workdir: PurePosixPath | None = None
    variables: dict[str, str] = {}
    stage = ""
    for number, line in enumerate(_instructions(dockerfile)):
        keyword, _, rest = line.partition(" ")
        rest = rest.strip()
        match keyword.upper():
            case "FROM":
                words = [word for word in rest.split() if not word.startswith("--")]
                base = _expand(words[0], variables) if words else ""
                inherited = stages.get(base.lower(), (None, {}))
                workdir, variables = inherited[0], {**(variables if not stage else {}), **inherited[1]}
                stage = words[2].lower() if len(words) == 3 else str(number)
            case "WORKDIR":
                # Joining with an absolute path gives that path.
                workdir = (workdir or PurePosixPath("/")) / _expand(rest.strip("\"'"), variables)
            case "ARG" | "ENV":
                for name, value in _assignments(rest):
                    variables[name] = _expand(value, variables)
            case _:
                pass
        if stage:
            stages[stage] = (workdir, dict(variables))
    return None if workdir is None else str(workdir)


def _instructions(text: str) -> list[str]:
    """Return the instructions, a continued one on one line, without comments."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\[ \t]*\n", " ", "\n".join(lines))
    return [line.strip() for line in joined.splitlines() if line.strip()]


def _assignments(rest: str) -> list[tuple[str, str]]:
    """Read `NAME=value …`, or the older `NAME value`."""
    if re.match(r"\w+=", rest):
        return [(name, value.strip("\"'")) for name, value in _ASSIGNMENT.findall(rest)]
    name, _, value = rest.partition(" ")
    return [(name, value.strip())] if value else []


def _expand(text: str, variables: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name, operator, word = match[1] or match[2], match[3], match[4] or ""
        known = variables.get(name, "")
        if operator == "-":
            return known or word
        if operator == "+":
            return word if known else ""
        return known

    return _VARIABLE.sub(value, text)
