"""What is asked of the engine, looked at without one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

pytest.importorskip("docker")

from clawgym_env.errors import SandboxError
from clawgym_env.sandbox.base import Image, Mount, SandboxSpec
from clawgym_env.sandbox.bubblewrap import disks
from clawgym_env.sandbox.docker_spec import DEADLINE, OWNER, RUN, container_config, environment
from clawgym_env.sandbox.images import ResolvedImage
from clawgym_env.sandbox.seccomp import docker_profile

HOST = ResolvedImage("host", (), ("/usr/bin/python3",), MappingProxyType({}))
OTHER = ResolvedImage("other", (), ("/lent/ld.so", "/lent/bin/python3"), {"PATH": "/own:/bin", "HOME": "/else"})


def config(spec: SandboxSpec, image: ResolvedImage = HOST, folder: Path = Path("/tmp"), **more: str) -> dict[str, Any]:
    return container_config(spec, image, run="7", socket_folder=folder, seccomp=docker_profile(), **more)


def test_a_container_may_do_nothing_that_it_need_not() -> None:
    asked = config(SandboxSpec())
    host = asked["HostConfig"]
    assert host["NetworkMode"] == "none"
    assert host["CapDrop"] == ["ALL"]
    assert host["ReadonlyRootfs"]
    assert "no-new-privileges:true" in host["SecurityOpt"]
    (profile,) = [option for option in host["SecurityOpt"] if option.startswith("seccomp=")]
    assert json.loads(profile.removeprefix("seccomp="))["syscalls"]
    assert host["MemorySwap"] == host["Memory"]
    assert all(mount["ReadOnly"] for mount in host["Mounts"])
    assert not {"Privileged", "CapAdd", "Devices", "Binds", "PidMode", "Runtime"} & host.keys()


def test_labels_say_whose_it_is_and_until_when() -> None:
    labels = config(SandboxSpec(lifetime_s=100))["Labels"]
    assert labels[OWNER].startswith(f"{os.getpid()}-")
    assert labels[DEADLINE].isdigit()
    assert labels[RUN] == "7"


def test_every_writable_folder_has_the_size_that_was_asked_for() -> None:
    disks = config(SandboxSpec(workdir="/app", folders=("/logs", "/root/in/home", "/tmp/x"), disk_mb=33))["HostConfig"]
    assert set(disks["Tmpfs"]) == {"/root", "/tmp", "/app", "/logs"}
    assert all("size=33m" in options and "nosuid,nodev" in options for options in disks["Tmpfs"].values())
    writable = SandboxSpec(image=Image(name="other", writable=True))
    assert config(writable, OTHER)["HostConfig"]["Tmpfs"] == {}


def test_an_image_shows_what_it_does_not_hold_already(tmp_path: Path) -> None:
    holding = ResolvedImage("other", (), ("python3",), {}, frozenset({"/opt/held"}))
    mounts = (Mount(source=tmp_path, target="/opt/held"), Mount(source=tmp_path, target="/opt/shown"))
    targets = {mount["Target"] for mount in config(SandboxSpec(mounts=mounts), holding)["HostConfig"]["Mounts"]}
    assert "/opt/shown" in targets
    assert "/opt/held" not in targets


def test_the_environment_is_the_images_but_home_is_ours_and_the_task_has_the_last_word() -> None:
    spec = SandboxSpec(image=Image(name="other"), env={"TASK": "1"})
    found = environment(spec, OTHER)
    assert (found["PATH"], found["HOME"], found["TASK"]) == ("/own:/bin", "/root", "1")
    assert "/lent" not in environment(spec, ResolvedImage("bare", (), OTHER.python, {}))["PATH"]


def test_what_is_mounted_inside_a_shown_folder_is_read_only_as_well() -> None:
    mounts = config(SandboxSpec(mounts=(Mount(source=Path("/dev"), target="/x"),)))["HostConfig"]["Mounts"]
    shown = {mount["Target"]: mount for mount in mounts if mount["Target"].startswith("/x")}
    assert {"/x", "/x/pts"} <= shown.keys()
    assert all(mount["ReadOnly"] and mount["BindOptions"]["NonRecursive"] for mount in shown.values())
    assert shown["/x/pts"]["Source"] == "/dev/pts"


def test_more_processors_than_there_are_may_be_asked_for() -> None:
    host = config(SandboxSpec(cpus=500.0))["HostConfig"]
    assert host["CpuQuota"] == 500 * host["CpuPeriod"]
    assert "NanoCpus" not in host


def test_folders_in_each_other_share_a_disk_whatever_their_order() -> None:
    assert disks(SandboxSpec(folders=("/logs/a", "/logs", "/root/b"))) == ["/root", "/tmp", "/logs"]


def test_a_runtime_is_passed_on() -> None:
    assert config(SandboxSpec(), runtime="runsc")["HostConfig"]["Runtime"] == "runsc"


def test_a_mount_that_is_missing_and_a_path_that_is_none_are_refused() -> None:
    with pytest.raises(SandboxError, match="/nonexistent to exist"):
        config(SandboxSpec(mounts=(Mount(source=Path("/nonexistent"), target="/x"),)))
    for target in ("relative", "/", "/a/../b"):
        with pytest.raises(SandboxError, match="absolute path"):
            config(SandboxSpec(mounts=(Mount(source=Path("/tmp"), target=target),)))
