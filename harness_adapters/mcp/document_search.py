"""An MCP server that searches a folder of text files: the bundled tool a task can give to any harness that speaks MCP.

Runs inside the sandbox, started by the harness over stdio, with nothing but the `mcp` package beside it. The files are
read anew for every query, since the agent may have changed them. Invariant: nothing outside the folder is read or
named, links included, and a file that cannot be read as text is left out.
"""

from __future__ import annotations

import argparse
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PASSAGE_LINES = 12
MAX_FILE_BYTES = 1 << 20
MAX_FILES = 2000
MAX_READ_LINES = 200
MAX_RESULTS = 20
# The usual constants of BM25 (Robertson and Zaragoza 2009, section 3.2).
K1 = 1.2
B = 0.75

_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Passage:
    """Some lines of one file."""

    path: str
    """Relative to the folder."""
    line: int
    """Number of the first line, from 1."""
    text: str


def read_passages(folder: Path) -> list[Passage]:
    """Return every text file under `folder`, hidden ones left out, in passages in order of path."""
    passages = []
    for path in _files(folder):
        lines = _lines(path)
        name = path.relative_to(folder).as_posix()
        for start in range(0, len(lines), PASSAGE_LINES):
            text = "\n".join(lines[start : start + PASSAGE_LINES])
            if text.strip():
                passages.append(Passage(name, start + 1, text))
    return passages


def search(passages: Sequence[Passage], query: str, *, limit: int = 5) -> list[Passage]:
    """Return the passages that match a query best, best first, by BM25 over their words and those of their path."""
    bags = [Counter(_words(f"{passage.path} {passage.text}")) for passage in passages]
    lengths = [sum(bag.values()) for bag in bags]
    mean = sum(lengths) / len(lengths) if lengths else 1.0
    scores = [0.0] * len(passages)
    for word in set(_words(query)):
        holders = [i for i, bag in enumerate(bags) if word in bag]
        rarity = math.log(1 + (len(bags) - len(holders) + 0.5) / (len(holders) + 0.5))
        for i in holders:
            count = bags[i][word]
            scores[i] += rarity * count * (K1 + 1) / (count + K1 * (1 - B + B * lengths[i] / mean))
    ranked = sorted((i for i, score in enumerate(scores) if score > 0), key=lambda i: -scores[i])
    return [passages[i] for i in ranked[: max(1, min(limit, MAX_RESULTS))]]


def read_lines(folder: Path, path: str, *, line: int = 1, count: int = MAX_READ_LINES) -> str:
    """Return lines of one file of the folder.

    Raises:
        ValueError: no such text file inside the folder.
    """
    root = folder.resolve()
    file = (root / path).resolve()
    if not file.is_relative_to(root) or not file.is_file():
        raise ValueError(f"Expected a file of the folder, got {path!r}. Use a path that search has shown.")
    start = max(line, 1) - 1
    return "\n".join(_lines(file)[start : start + max(1, min(count, MAX_READ_LINES))])


def main() -> None:
    """Serve over stdio until the harness closes it."""
    from mcp.server.mcpserver import MCPServer

    parser = argparse.ArgumentParser(description="Search the text files of a folder, as an MCP server over stdio.")
    parser.add_argument("--folder", type=Path, default=Path())
    folder = parser.parse_args().folder.resolve()
    server = MCPServer("documents", log_level="ERROR")

    def search_documents(query: str, limit: int = 5) -> str:
        """Search the documents. Returns the best passages, each with its file and first line number."""
        found = search(read_passages(folder), query, limit=limit)
        return "\n\n".join(f"[{p.path}:{p.line}]\n{p.text}" for p in found) or "Nothing found."

    def read_document(path: str, line: int = 1, count: int = MAX_READ_LINES) -> str:
        """Read lines of one document, named as in the results of a search."""
        return read_lines(folder, path, line=line, count=count)

    for tool in (search_documents, read_document):
        server.add_tool(tool, structured_output=False)
    server.run("stdio")


def _files(folder: Path) -> Iterator[Path]:
    found = (path for path in sorted(folder.rglob("*")) if not path.is_symlink() and path.is_file())
    shown = (path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts))
    for count, path in enumerate(shown):
        if count == MAX_FILES:
            return
        yield path


def _lines(path: Path) -> list[str]:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            return []
        return path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def _words(text: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(text)]


if __name__ == "__main__":
    main()
