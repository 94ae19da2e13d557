"""The words in a Word, Excel or PowerPoint file, for a judge that reads text only.

Called by `evidence` in a thread on files that an agent made. Pure standard library: such a file is a zip archive of
XML. Invariant: reading is bounded, and a file that is not what its name says is no text, never an error.
"""

from __future__ import annotations

import lzma
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from xml.etree import ElementTree

MAX_PART_BYTES = 16 << 20
"""Of one unpacked XML part; a larger one is no text."""
MAX_PARTS = 200
_BROKEN = (
    OSError,
    EOFError,
    ValueError,
    LookupError,
    RuntimeError,  # encrypted, a method of compression that nobody knows, or XML of endless depth
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    ElementTree.ParseError,
)
"""What Python raises on archives that are none, too big or broken in the middle."""
MAX_CHARS = 1_000_000
"""Of the whole text; what would follow is left out."""


def office_text(path: Path) -> str | None:
    """Return the text of a docx, pptx or xlsx file; None for any other and for a broken one."""
    read = _READERS.get(path.suffix.lower())
    if read is None:
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            lines, room = [], MAX_CHARS
            for line in read(archive):
                lines.append(line[:room])
                room -= len(line) + 1
                if room <= 0:
                    break
            return "\n".join(lines)
    except _BROKEN:
        return None


def _part(archive: zipfile.ZipFile, name: str) -> ElementTree.Element:
    with archive.open(name) as part:
        data = part.read(MAX_PART_BYTES + 1)
    if len(data) > MAX_PART_BYTES or b"<!DOCTYPE" in data:  # no such file declares entities
        raise ValueError(f"Expected a small plain XML part, got {name}.")
    return ElementTree.fromstring(data)


def _numbered(archive: zipfile.ZipFile, pattern: str) -> list[str]:
    """Return the names of parts that end in a number, by it."""
    found = [(int(match[1]), name) for name in archive.namelist() if (match := re.fullmatch(pattern, name))]
    return [name for _, name in sorted(found)[:MAX_PARTS]]


def _local(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]


def _paragraphs(root: ElementTree.Element) -> Iterator[str]:
    for paragraph in root.iter():
        if _local(paragraph) == "p":
            yield "".join(
                {"t": part.text or "", "tab": "\t", "br": "\n"}.get(_local(part), "") for part in paragraph.iter()
            )


def _word(archive: zipfile.ZipFile) -> Iterator[str]:
    yield from _paragraphs(_part(archive, "word/document.xml"))


def _slides(archive: zipfile.ZipFile) -> Iterator[str]:
    for number, name in enumerate(_numbered(archive, r"ppt/slides/slide(\d+)\.xml"), start=1):
        yield f"-- slide {number}"
        yield from _paragraphs(_part(archive, name))


def _sheets(archive: zipfile.ZipFile) -> Iterator[str]:
    shared: list[str] = []
    if "xl/sharedStrings.xml" in archive.namelist():
        shared = [_words(item) for item in _part(archive, "xl/sharedStrings.xml")]
    titles = [each.get("name", "") for each in _part(archive, "xl/workbook.xml").iter() if _local(each) == "sheet"]
    for number, name in enumerate(_numbered(archive, r"xl/worksheets/sheet(\d+)\.xml")):
        yield f"-- sheet {titles[number] if number < len(titles) else number + 1}"
        for row in _part(archive, name).iter():
            if _local(row) == "row":
                cells = ((cell.get("r", "?"), _cell(cell, shared)) for cell in row)
                yield "\t".join(f"{place}={value}" for place, value in cells if value)


def _words(item: ElementTree.Element) -> str:
    return "".join(part.text or "" for part in item.iter() if _local(part) == "t")


def _cell(cell: ElementTree.Element, shared: list[str]) -> str:
    """Return what a cell shows; its formula where no program has worked that out yet."""
    parts = {_local(part): part.text or "" for part in cell}
    if cell.get("t") == "s":
        return shared[int(parts["v"])] if int(parts["v"]) < len(shared) else ""
    if cell.get("t") == "inlineStr":
        return _words(cell)
    return parts.get("v") or (f"={parts['f']}" if "f" in parts else "")


_READERS: Mapping[str, Callable[[zipfile.ZipFile], Iterator[str]]] = {
    ".docx": _word,
    ".pptx": _slides,
    ".xlsx": _sheets,
}
