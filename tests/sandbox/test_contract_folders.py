"""Contract of every backend: folders go in and come out, whatever an agent did to them."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import tracemalloc
from pathlib import Path

import pytest
from contract import InSandbox, every_backend, python

from clawgym_env.sandbox.base import WORKDIR, Sandbox, SandboxBackend, SandboxSpec


def names(folder: Path) -> set[str]:
    """Return the paths of what lies in a folder, relative to it."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@every_backend
@pytest.mark.parametrize("seconds", [2**40, -(2**40)])
def test_a_file_from_another_aeon_comes_out(in_sandbox: InSandbox, tmp_path: Path, seconds: int) -> None:
    async def body(sandbox: Sandbox) -> None:
        code = "import os, sys; open('old', 'w').write('kept'); os.utime('old', (int(sys.argv[1]),) * 2)"
        await python(sandbox, code, str(seconds))
        await sandbox.copy_out(".", tmp_path / "out")

    in_sandbox(body)
    assert (tmp_path / "out" / "old").read_text() == "kept"


def test_folders_go_in_and_come_out_unchanged(in_sandbox: InSandbox, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "deep" / "er").mkdir(parents=True)
    (source / "empty dir").mkdir()
    (source / "empty file").touch()
    (source / "deep" / "er" / "dätä.bin").write_bytes(os.urandom(300_000))
    (source / "new\nline \udcff").write_text("odd")
    (source / ("n" * 255)).write_text("long")
    (source / "cafe\u0301").write_text("NFD")
    (source / "caf\u00e9").write_text("NFC")
    (source / "run.sh").write_text("#!/bin/sh\n")
    (source / "run.sh").chmod(0o755)
    (source / "link").symlink_to("deep/er/dätä.bin")
    os.utime(source / "run.sh", (1_000_000_000, 1_000_000_000))

    async def body(sandbox: Sandbox) -> None:
        await sandbox.copy_in(source, f"{WORKDIR}/sub")
        assert (await sandbox.exec(["cat", "sub/cafe\u0301", "sub/caf\u00e9"])).stdout == b"NFDNFC"
        await sandbox.copy_out("sub", target)
        with pytest.raises(FileNotFoundError):
            await sandbox.copy_in(tmp_path / "missing", "sub")

    in_sandbox(body)
    assert names(target) == names(source)
    assert (target / "link").read_bytes() == (source / "deep" / "er" / "dätä.bin").read_bytes()
    assert (target / "link").is_symlink()
    assert stat.S_IMODE((target / "run.sh").stat().st_mode) == 0o755
    assert (target / "run.sh").stat().st_mtime == 1_000_000_000


@every_backend
def test_nothing_dangerous_goes_in(in_sandbox: InSandbox, tmp_path: Path) -> None:
    (tmp_path / "good").write_text("ok")
    (tmp_path / "suid").touch()
    (tmp_path / "suid").chmod(0o4755)
    (tmp_path / "out").symlink_to("/etc/hostname")
    os.mkfifo(tmp_path / "fifo")

    async def body(sandbox: Sandbox) -> None:
        await sandbox.copy_in(tmp_path, "sub")
        listing = await sandbox.exec(["sh", "-c", "ls -A; stat -c %a suid"], cwd="sub")
        assert listing.stdout == b"good\nsuid\n755\n"

    in_sandbox(body)


@every_backend
def test_nothing_dangerous_comes_out(in_sandbox: InSandbox, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = tmp_path / "target"
    script = """
mkdir -p d/e; echo ok > good; mkfifo fifo; cp /bin/true suid; chmod 4755 suid
ln -s /etc/passwd out; ln -s ../../.. up; ln -s good inside; ln -s "$PWD/d/../good" absolute
ln -s ../.. d/e/top; ln -s d/e/top/../secret hop; truncate -s 1T sparse; python3 -c '
import socket; socket.socket(socket.AF_UNIX).bind("sock")'
"""

    async def body(sandbox: Sandbox) -> None:
        assert (await sandbox.exec(["sh", "-c", script])).exit_code == 0
        await sandbox.copy_out(WORKDIR, target)

    in_sandbox(body)
    assert names(target) == {"d", "d/e", "d/e/top", "good", "suid", "inside", "absolute"}
    assert stat.S_IMODE((target / "suid").stat().st_mode) == 0o755
    assert (target / "absolute").read_text() == "ok\n"
    assert not os.readlink(target / "absolute").startswith("/")
    assert "Left 1 files" in caplog.text


@every_backend
@pytest.mark.parametrize(
    ("script", "left"),
    [
        ('cd ..; rm -rf "$OLDPWD"', set()),
        ('cd ..; rm -rf "$OLDPWD"; echo x > "$OLDPWD"', set()),
        ('cd ..; rm -rf "$OLDPWD"; ln -s "$OLDPWD" "$OLDPWD"', set()),
        ("mkdir d; touch d/f; chmod 000 d/f d .. .", {"d", "d/f"}),
        ("mkdir d; touch d/f; chmod 400 d", {"d", "d/f"}),
        ('python3 -c \'import os\nfor i in range(60): os.mkdir("a" * 200); os.chdir("a" * 200)\'', None),
        ('python3 -c \'import os\nfor i in range(3000): os.mkdir("a"); os.chdir("a")\'', None),
        ("ln -s $(head -c 4000 /dev/zero | tr '\\0' x) link; touch f", {"f"}),
    ],
)
def test_whatever_an_agent_does_to_its_workspace_it_comes_out(
    in_sandbox: InSandbox, tmp_path: Path, script: str, left: set[str] | None
) -> None:
    target = tmp_path / "target"

    async def body(sandbox: Sandbox) -> None:
        # `cd` tells the shell OLDPWD: the workspace, wherever the fake keeps it.
        assert (await sandbox.exec(["sh", "-c", f"cd .; {script}"])).exit_code == 0
        await sandbox.kill_all()
        await sandbox.copy_out(WORKDIR, target)

    in_sandbox(body)
    assert names(target) == left or (left is None and names(target))
    assert all(path.read_bytes() == b"" for path in target.rglob("f"))
    shutil.rmtree(target)


def test_a_home_that_its_owner_may_not_read_comes_out(in_sandbox: InSandbox, tmp_path: Path) -> None:
    async def body(sandbox: Sandbox) -> None:
        assert (await sandbox.exec(["sh", "-c", "touch f; chmod 000 f . /root/.openclaw /root"])).exit_code == 0
        await sandbox.copy_out(WORKDIR, tmp_path / "target")

    in_sandbox(body)
    assert names(tmp_path / "target") == {"f"}


@pytest.mark.parametrize(
    "script",
    [
        "truncate -s 8M a b",
        "head -c 14M /dev/zero > a; head -c 1900K /dev/zero > b",
        'python3 -c \'for i in range(3900): open(str(i), "w").write("x")\'',
    ],
)
def test_what_comes_out_fits_into_a_fresh_sandbox_with_room_to_spare(
    backend: SandboxBackend, tmp_path: Path, script: str
) -> None:
    async def main() -> None:
        spec = SandboxSpec(disk_mb=16)
        full, fresh = await backend.open(spec), await backend.open(spec)
        try:
            assert (await full.exec(["sh", "-c", script])).exit_code == 0
            await full.copy_out(WORKDIR, tmp_path / "target")
            await fresh.copy_in(tmp_path / "target", WORKDIR)
            await fresh.write_file("hidden", bytes(3 << 19))
        finally:
            await asyncio.gather(full.close(), fresh.close())

    asyncio.run(main())
    assert any((tmp_path / "target").iterdir())


@every_backend
def test_ten_thousand_files_go_in_and_come_out(in_sandbox: InSandbox, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for folder in range(100):
        (source / str(folder)).mkdir(parents=True)
        for file in range(100):
            (source / str(folder) / str(file)).write_bytes(b"x" * (file % 3))

    async def body(sandbox: Sandbox) -> None:
        await sandbox.copy_in(source, WORKDIR)
        found = await sandbox.exec(["sh", "-c", "find . -type f | wc -l"])
        assert found.stdout.strip() == b"10000"
        await sandbox.copy_out(WORKDIR, target)

    in_sandbox(body)
    assert names(target) == names(source)
    assert (target / "99" / "98").read_bytes() == b"xx"


@every_backend
def test_copies_of_a_hundred_megabytes_use_no_memory_of_ours(in_sandbox: InSandbox, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    with (source / "big").open("wb") as file:
        file.truncate(100 << 20)

    async def body(sandbox: Sandbox) -> int:
        tracemalloc.start()
        try:
            await sandbox.copy_in(source, WORKDIR)
            await sandbox.copy_out(WORKDIR, tmp_path / "target")
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak = in_sandbox(body)
    assert isinstance(peak, int)
    assert peak < 16 << 20
    assert (tmp_path / "target" / "big").stat().st_size == 100 << 20
