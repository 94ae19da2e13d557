"""Contract of every backend: single files, of any name and content."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from contract import InSandbox, every_backend, isolated

from clawgym_env.errors import SandboxError
from clawgym_env.sandbox.base import WORKDIR, Mount, Sandbox, SandboxBackend

pytestmark = every_backend

NAMES = [
    "a b/ü 漢字.bin",
    "/tmp/x/'quoted\" $HOME.bin",
    "-rf",
    "new\nline",
    " spaces ",
    "cafe\u0301",  # NFD: another file than its NFC form
    "caf\u00e9",
    "\udcff\udcfe",  # bytes that are no UTF-8
    "n" * 255,
    "é" * 127,
]


def test_files_of_any_name_and_content_go_in_and_come_out(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        for number, path in enumerate(NAMES):
            await sandbox.write_file(path, bytes(range(256)) * 50 + bytes([number]))
        for number, path in enumerate(NAMES):
            assert await sandbox.read_file(path) == bytes(range(256)) * 50 + bytes([number])
        assert (await sandbox.exec(["cat", "--", "-rf"])).stdout[-1] == 2
        await sandbox.write_file("empty", b"")
        assert await sandbox.read_file("empty") == b""

    in_sandbox(body)


def test_large_files_go_in_and_come_out(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        data = os.urandom(1 << 20) * 32
        await sandbox.write_file("large", data)
        assert await sandbox.read_file("large") == data

    in_sandbox(body)


def test_a_name_of_256_bytes_is_an_error_of_the_file_system(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        with pytest.raises(OSError, match="File name too long"):
            await sandbox.write_file("n" * 256, b"")

    in_sandbox(body)


def test_a_written_file_has_its_mode_and_replaces_the_old_one(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.write_file("run.sh", b"#!/bin/sh\necho ran\n", mode=0o755)
        assert (await sandbox.exec(["./run.sh"])).stdout == b"ran\n"
        await sandbox.write_file("run.sh", b"x", mode=0o600)
        assert (await sandbox.exec(["stat", "-c", "%a %s", "run.sh"])).stdout == b"600 1\n"

    in_sandbox(body)


def test_a_written_file_replaces_a_link_in_its_place(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.exec(["sh", "-c", "echo old > other; ln -s other link; ln -s nowhere dangling"])
        for link in ("link", "dangling"):
            await sandbox.write_file(link, b"new")
            assert await sandbox.read_file(link) == b"new"
        assert await sandbox.read_file("other") == b"old\n"
        with pytest.raises(FileNotFoundError):
            await sandbox.read_file("nowhere")

    in_sandbox(body)


def test_what_cannot_be_written_is_an_error_of_the_file_system(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.exec(["sh", "-c", "mkdir folder; touch file; mkfifo fifo"])
        for path in ("folder", "file/below", "fifo"):
            with pytest.raises(OSError, match=r".") as caught:
                await sandbox.write_file(path, b"x")
            assert caught.value.errno, path

    in_sandbox(body)


def test_only_regular_files_of_bounded_size_are_read(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        script = "mkfifo fifo; ln -s missing link; ln -s loop loop; head -c 1001 /dev/zero > big; ln -s big to-big"
        await sandbox.exec(["sh", "-c", script])
        for path in ("missing", "link", "/no/such/folder/file"):
            with pytest.raises(FileNotFoundError):
                await sandbox.read_file(path)
        for path in ("fifo", "."):
            with pytest.raises(OSError, match="not a regular file"):
                await sandbox.read_file(path)
        with pytest.raises(OSError, match="symbolic links"):
            await sandbox.read_file("loop")
        with pytest.raises(OSError, match="larger than 1000 bytes"):
            await sandbox.read_file("big", max_bytes=1000)
        assert len(await sandbox.read_file("to-big", max_bytes=1001)) == 1001

    in_sandbox(body)


def test_no_link_is_followed_out_of_the_sandbox(in_sandbox: InSandbox, tmp_path: Path) -> None:
    secret, folder = tmp_path / "secret", tmp_path / "folder"
    secret.write_text("host only")
    folder.mkdir()

    async def body(sandbox: Sandbox) -> None:
        await sandbox.exec(["sh", "-c", f"ln -s {secret} link; ln -s {folder} folder; ln -s {'../' * 20} up"])
        for path in ("link", f"up{secret}"):
            with pytest.raises(FileNotFoundError):
                await sandbox.read_file(path)
        await sandbox.write_file("link", b"inside")
        with pytest.raises(OSError, match=r"."):
            await sandbox.write_file("folder/file", b"inside")

    in_sandbox(body)
    assert secret.read_text() == "host only"
    assert not any(folder.iterdir())


def test_mounts_are_shown_and_must_exist(in_sandbox: InSandbox, backend: SandboxBackend, tmp_path: Path) -> None:
    (tmp_path / "tool").mkdir()
    (tmp_path / "tool" / "file").write_text("content")
    mounts = [
        {"source": tmp_path / "tool", "target": "/opt/tool"},
        {"source": tmp_path / "tool" / "file", "target": "/root/f"},
    ]

    async def body(sandbox: Sandbox) -> None:
        assert await sandbox.read_file("/opt/tool/file") == await sandbox.read_file("/root/f") == b"content"
        if isolated(backend):
            for path in ("/opt/tool/file", "/opt/tool/new", "/root/f"):
                with pytest.raises(OSError, match="Read-only file system"):
                    await sandbox.write_file(path, b"changed")
            assert (await sandbox.exec(["rm", "-rf", "/opt/tool/file"])).exit_code != 0

    in_sandbox(body, mounts=mounts)
    assert (tmp_path / "tool" / "file").read_text() == "content"
    with pytest.raises(SandboxError, match="Expected"):
        in_sandbox(body, mounts=[Mount(source=tmp_path / "nothing", target="/opt/x")])


def test_a_workspace_and_folders_anywhere_exist_empty_and_writable(in_sandbox: InSandbox) -> None:
    folders = ("/tests", "/logs/verifier", "/root/out", "/tmp/a b")

    async def body(sandbox: Sandbox) -> None:
        assert (await sandbox.exec(["ls", "-A"])).stdout == b""
        await sandbox.write_file("x", b"1")
        assert (await sandbox.exec(["cat", "x"])).stdout == b"1"
        for folder in folders:
            assert (await sandbox.exec(["ls", "-A"], cwd=folder)).stdout == b"", folder
            await sandbox.write_file(f"{folder}/x", b"2")
            assert (await sandbox.exec(["sh", "-c", "cat x; echo more >> x; rm x"], cwd=folder)).stdout == b"2"

    in_sandbox(body, workdir="/srv/task", folders=folders)
    in_sandbox(body, workdir=f"{WORKDIR}/deep er/ü", folders=folders)
