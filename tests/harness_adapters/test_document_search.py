"""The bundled document search: what it finds, what it never shows, and that a real MCP client can use it."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness_adapters.mcp.document_search import PASSAGE_LINES, read_lines, read_passages, search


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    docs = tmp_path / "docs"
    (docs / "notes").mkdir(parents=True)
    (docs / "notes/rent.txt").write_text("\n".join(f"line {i}" for i in range(1, 30)) + "\nThe rent is 940 euros.\n")
    (docs / "menu.md").write_text("Soup and bread.\nThe rent of a table is free.\n")
    (docs / "photo.bin").write_bytes(b"\xff\xfe rent")
    (docs / ".git").mkdir()
    (docs / ".git/log").write_text("rent rent rent")
    (tmp_path / "outside.txt").write_text("The rent is secret.")
    (docs / "link.txt").symlink_to(tmp_path / "outside.txt")
    return docs


def test_a_passage_knows_its_file_and_its_first_line(folder: Path) -> None:
    found = search(read_passages(folder), "rent euros")[0]
    assert (found.path, found.line) == ("notes/rent.txt", 2 * PASSAGE_LINES + 1)
    assert "940 euros" in found.text


def test_links_hidden_files_and_what_is_no_text_are_never_shown(folder: Path) -> None:
    assert {passage.path for passage in read_passages(folder)} == {"menu.md", "notes/rent.txt"}
    assert all("secret" not in passage.text for passage in search(read_passages(folder), "rent", limit=20))


def test_the_words_of_a_path_count_too(folder: Path) -> None:
    assert search(read_passages(folder), "menu")[0].path == "menu.md"


def test_nothing_matches_nothing(folder: Path) -> None:
    assert search(read_passages(folder), "zeppelin") == []
    assert search([], "rent") == []
    assert search(read_passages(folder), "") == []


@pytest.mark.parametrize("limit", [-3, 0, 1, 10**9])
def test_any_limit_a_model_may_ask_for_is_bounded(folder: Path, limit: int) -> None:
    assert 1 <= len(search(read_passages(folder), "line", limit=limit)) <= 20


@pytest.mark.parametrize("path", ["../outside.txt", "link.txt", "/etc/passwd", "notes", "absent.txt"])
def test_only_files_of_the_folder_can_be_read(folder: Path, path: str) -> None:
    with pytest.raises(ValueError, match="Expected a file of the folder"):
        read_lines(folder, path)


def test_lines_are_read_from_where_a_result_points(folder: Path) -> None:
    assert read_lines(folder, "notes/rent.txt", line=30, count=5) == "The rent is 940 euros."
    assert read_lines(folder, "notes/rent.txt", line=-7, count=1) == "line 1"
