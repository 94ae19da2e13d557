"""Control groups v2 cannot be had on every machine, so both versions are tried on plain folders."""

from __future__ import annotations

import asyncio
import os
import resource
from pathlib import Path

import pytest

from clawgym_env.ownership import owner_scope
from clawgym_env.sandbox.base import SandboxSpec
from clawgym_env.sandbox.limits import SHM_MB, ControlGroups, rlimits

SPEC = SandboxSpec(memory_mb=100, disk_mb=20, max_processes=10, cpus=1.5)


def mounts_file(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "mounts"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def v1_mounts(tmp_path: Path) -> Path:
    (tmp_path / "cpu,cpuacct").mkdir()
    (tmp_path / "memory").mkdir()
    (tmp_path / "pids").mkdir()
    return mounts_file(
        tmp_path,
        "sysfs /sys sysfs rw 0 0",
        f"cgroup {tmp_path}/memory cgroup rw,memory 0 0",
        f"cgroup {tmp_path}/pids cgroup rw,pids 0 0",
        f"cgroup {tmp_path}/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0",
    )


def test_version_one_limits_are_written_per_hierarchy(tmp_path: Path) -> None:
    groups = ControlGroups.find(v1_mounts(tmp_path))
    assert groups is not None
    group = groups.make(SPEC, disks=2)
    memory, pids, cpu = group.paths
    assert (memory / "memory.limit_in_bytes").read_text() == str((100 + 2 * 20 + SHM_MB) << 20)
    assert (pids / "pids.max").read_text() == "18"
    assert (cpu / "cpu.cfs_quota_us").read_text() == "150000"
    group.add(123)
    assert {(path / "cgroup.procs").read_text() for path in group.paths} == {"123"}


def test_all_sandboxes_together_weigh_as_much_as_a_process_for_each_core(tmp_path: Path) -> None:
    cores = os.cpu_count() or 1
    assert ControlGroups.find(v1_mounts(tmp_path)) is not None
    assert (tmp_path / "cpu,cpuacct" / "clawgym" / "cpu.shares").read_text() == str(min(262_144, 1024 * cores))
    assert ControlGroups.find(mounts_file(tmp_path, f"cgroup2 {tmp_path} cgroup2 rw 0 0")) is not None
    assert (tmp_path / "clawgym" / "cpu.weight").read_text() == str(min(10_000, 100 * cores))


def test_version_two_limits_are_written_in_one_directory(tmp_path: Path) -> None:
    groups = ControlGroups.find(mounts_file(tmp_path, f"cgroup2 {tmp_path} cgroup2 rw 0 0"))
    assert groups is not None
    assert (tmp_path / "clawgym" / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"
    (path,) = groups.make(SPEC, disks=2).paths
    assert path.parent == tmp_path / "clawgym"
    assert (path / "memory.max").read_text() == str((100 + 2 * 20 + SHM_MB) << 20)
    assert (path / "pids.max").read_text() == "18"
    assert (path / "cpu.max").read_text() == "150000 100000"


@pytest.mark.parametrize(
    "line", ["cgroup {} cgroup rw,memory 0 0", "cgroup2 {}/mounts cgroup2 rw 0 0", "tmpfs {} tmpfs rw 0 0"]
)
def test_incomplete_hierarchies_are_not_used(tmp_path: Path, line: str) -> None:
    assert ControlGroups.find(mounts_file(tmp_path, line.format(tmp_path))) is None


def test_only_directories_of_dead_owners_are_swept(tmp_path: Path) -> None:
    groups = ControlGroups.find(v1_mounts(tmp_path))
    assert groups is not None
    groups.make(SPEC, disks=2)
    parent = tmp_path / "pids" / "clawgym"
    (mine,) = parent.iterdir()
    for name in (f"{os.getpid()}-1-{owner_scope()}-reusedpid", f"4194303-12345-{owner_scope()}-dead", "stranger"):
        (parent / name).mkdir()
    groups.sweep()
    assert set(parent.iterdir()) == {mine, parent / "stranger"}


def test_removal_tolerates_what_is_gone(tmp_path: Path) -> None:
    groups = ControlGroups.find(v1_mounts(tmp_path))
    assert groups is not None
    group = groups.make(SPEC, disks=2)
    for path in group.paths:
        for file in path.iterdir():
            file.unlink()
    group.paths[0].rmdir()
    asyncio.run(group.remove())
    assert not any(path.exists() for path in group.paths)


def test_rlimits_stand_in_where_there_are_no_groups() -> None:
    assert rlimits(SPEC, with_groups=True) == {resource.RLIMIT_CORE: 0}
    limits = rlimits(SPEC, with_groups=False)
    assert limits[resource.RLIMIT_DATA] == 100 << 20
    assert limits[resource.RLIMIT_NPROC] == 18
