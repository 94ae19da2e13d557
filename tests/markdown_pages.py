"""The README and the pages of docs/ as tests read them: sections, fenced blocks, code spans, tables and links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = (README, *sorted((ROOT / "docs").glob("*.md")))

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`\n]+)`")


@dataclass(frozen=True)
class Section:
    """What lies under one heading of the second level, those below it included."""

    page: Path
    title: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page.name}: {self.title}"

    def blocks(self, language: str) -> list[str]:
        """Return its fenced blocks of a language, in order."""
        return [code for found, code in _FENCE.findall(self.text) if found == language]

    def spans(self) -> list[str]:
        """Return its code spans; in tables a bar is written with a backslash."""
        return [span.replace("\\|", "|") for span in _SPAN.findall(_FENCE.sub("", self.text))]

    def rows(self) -> list[list[str]]:
        """Return the cells of its tables' rows, heads left out."""
        found: list[list[str]] = []
        for line in _FENCE.sub("", self.text).splitlines():
            if line.startswith("| ---"):
                found.pop()
            elif line.startswith("|"):
                found.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))])
        return found


def sections() -> Iterator[Section]:
    """Yield the sections of all pages; what stands before the first heading of a page has no title."""
    for page in PAGES:
        title, lines, fenced = "", [], False
        for line in page.read_text(encoding="utf-8").splitlines(keepends=True):
            fenced ^= line.startswith("```")
            if line.startswith("## ") and not fenced:
                yield Section(page, title, "".join(lines))
                title, lines = line[3:].strip(), []
            lines.append(line)
        yield Section(page, title, "".join(lines))


def section(page: Path, title: str) -> Section:
    """Return one section."""
    return next(found for found in sections() if (found.page, found.title) == (page, title))


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
