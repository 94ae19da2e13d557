"""`unpack` meets streams that no honest `pack` would write."""

from __future__ import annotations

import io
import os
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawgym_env.sandbox import folder_stream

HEADER = struct.Struct("<cIqQI")
LIMIT = 1 << 20


def entry(kind: bytes, path: bytes, data: bytes = b"", mode: int = 0o644, size: int | None = None) -> bytes:
    return HEADER.pack(kind, mode, 0, len(data) if size is None else size, len(path)) + path + data


END = entry(b"e", b"")


def unpack(stream: bytes, target: Path, *, origin: str = "/root/w") -> int:
    return folder_stream.unpack(io.BytesIO(stream), str(target), origin=origin, max_bytes=LIMIT)


def tree(root: Path) -> dict[str, bytes | str | None]:
    """Describe a folder: file -> bytes, link -> target, folder -> None."""
    found: dict[str, bytes | str | None] = {}
    for path in root.rglob("*"):
        name = str(path.relative_to(root))
        found[name] = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
    return found


names = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=8).filter(
    lambda name: name not in (".", "..")
)


@settings(max_examples=40)
@given(st.dictionaries(st.lists(names, min_size=1, max_size=3).map(tuple), st.binary(max_size=50), max_size=6))
def test_a_folder_survives_the_way_there_and_back(
    tmp_path_factory: pytest.TempPathFactory, files: dict[tuple[str, ...], bytes]
) -> None:
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("target")
    for parts, data in files.items():
        path = source.joinpath(*parts)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        except OSError:  # one path is a file and another's folder
            continue
    stream = io.BytesIO()
    folder_stream.pack(str(source), stream, max_bytes=LIMIT)
    assert unpack(stream.getvalue(), target) == 0
    assert tree(target) == tree(source)


@pytest.mark.parametrize("path", [b"../x", b"/x", b"a/../../x", b"a//b", b"", b".", b"a/\0", b"a" * 5000])
def test_paths_that_could_lead_out_are_refused(tmp_path: Path, path: bytes) -> None:
    target = tmp_path / "target"
    with pytest.raises(ValueError, match="Expected"):
        unpack(entry(b"f", path, b"data") + END, target)
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize(
    "stream",
    [
        b"",
        entry(b"f", b"x", b"abc")[:-1],
        entry(b"f", b"x", size=LIMIT + 1),
        entry(b"c", b"x") + END,
        entry(b"l", b"x", size=1 << 40),
    ],
)
def test_truncated_oversized_and_unknown_entries_are_refused(tmp_path: Path, stream: bytes) -> None:
    with pytest.raises(ValueError, match="Expected"):
        unpack(stream, tmp_path)


def test_a_file_never_goes_through_a_link(tmp_path: Path) -> None:
    outside, target = tmp_path / "outside", tmp_path / "target"
    outside.mkdir()
    unpack(entry(b"l", b"a", str(outside).encode()) + entry(b"f", b"a/x", b"data") + END, target)
    assert list(outside.iterdir()) == []
    assert tree(target) == {"a": None, "a/x": b"data"}


def test_links_that_lead_out_only_together_are_removed(tmp_path: Path) -> None:
    links = {b"d/e/top": b"../..", b"hop": b"d/e/top/../secret", b"hop2": b"hop/x", b"loop": b"loop", b"fine": b"d/e"}
    unpack(entry(b"d", b"d/e") + b"".join(entry(b"l", *link) for link in links.items()) + END, tmp_path)
    assert set(tree(tmp_path)) == {"d", "d/e", "d/e/top", "fine"}


def test_setuid_goes_and_all_stays_readable_and_folders_deletable(tmp_path: Path) -> None:
    files = entry(b"f", b"d/f", b"x", mode=0o6755) + entry(b"f", b"d/unreadable", b"x", mode=0o000)
    unpack(entry(b"d", b"d", mode=0o000) + files + END, tmp_path)
    assert (tmp_path / "d" / "f").stat().st_mode & 0o7777 == 0o755
    assert (tmp_path / "d" / "unreadable").stat().st_mode & 0o7777 == 0o400
    assert (tmp_path / "d").stat().st_mode & 0o7777 == 0o700


def test_what_does_not_fit_is_left_out_and_counted(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    (source / "a").write_bytes(bytes(600))
    (source / "b").write_bytes(bytes(4097))
    (source / "c").write_bytes(bytes(300))
    (source / "d").mkdir()
    assert unpack(packed(source, max_bytes=4 * 4096), target) == 2
    assert {path.name for path in target.iterdir()} == {"a", "c"}


def packed(source: Path, *, max_bytes: int = LIMIT) -> bytes:
    stream = io.BytesIO()
    folder_stream.pack(str(source), stream, max_bytes=max_bytes, make_readable=True)
    return stream.getvalue()


def test_no_folder_packs_as_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("gone", "file"):
        assert packed(tmp_path / name) == HEADER.pack(b"e", 0, 0, 0, 0)


def test_paths_too_deep_or_too_long_are_left_out_and_counted(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    deep = source.joinpath("deep", *"x" * 150)
    wide = source.joinpath("long", *["y" * 250] * 13)
    for folder in (deep, wide):
        folder.mkdir(parents=True)
    (source / "link").symlink_to("z" * 4000)
    assert unpack(packed(source), target) == 3
    assert {path.name for path in target.iterdir()} == {"deep", "long"}
    assert len(list((target / "deep").rglob("x"))) == 99


def test_entries_beyond_the_limit_are_left_out_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    for index in range(5):
        (source / str(index)).touch()
    monkeypatch.setattr(folder_stream, "MAX_ENTRIES", 3)
    assert unpack(packed(source), target) == 2
    assert len(list(target.iterdir())) == 3


def test_no_link_is_put_through_a_link(tmp_path: Path) -> None:
    outside, target = tmp_path / "outside", tmp_path / "target"
    outside.mkdir()
    unpack(entry(b"l", b"a", str(outside).encode()) + entry(b"l", b"a/b", b"x") + END, target)
    assert list(outside.iterdir()) == []


def test_a_chain_of_links_longer_than_any_stack_is_no_error(tmp_path: Path) -> None:
    chain = b"".join(entry(b"l", b"%d" % index, b"%d" % (index + 1)) for index in range(3000))
    absolute = entry(b"l", b"absolute", str(tmp_path / "file").encode())
    unpack(chain + absolute + entry(b"f", b"file", b"x") + END, tmp_path)
    found = tree(tmp_path)
    assert "2999" in found
    assert "0" not in found
    assert (tmp_path / "absolute").read_bytes() == b"x"
