"""Images with a harness inside: a rollout finds it where it would be mounted, and nothing is mounted."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from clawgym_env import cli
from clawgym_env.errors import HarnessNotInstalled, SandboxError
from clawgym_env.sandbox import harness_images
from clawgym_env.sandbox.base import Image, SandboxSpec
from clawgym_env.sandbox.docker import DockerBackend
from clawgym_env.sandbox.images import ImageStore
from harness_adapters.mini.adapter import MiniHarness
from harness_adapters.noop import NoopHarness
from harness_adapters.pi import PiHarness


@pytest.fixture
def store(docker_host: str) -> Iterator[ImageStore]:
    client = docker.DockerClient(docker_host)
    yield ImageStore(client)
    client.close()


def folder_image(store: ImageStore, folder: Path) -> str:
    """Return the tag of an image with next to nothing in it."""
    (folder / "Dockerfile").write_text("FROM scratch\nCOPY Dockerfile /\n")
    return store.resolve(Image(build=folder)).tag


def in_image(docker_host: str, tag: str, spec: SandboxSpec, script: str) -> list[str]:
    """Return the lines that a script prints in a sandbox of an image."""

    async def main() -> list[str]:
        backend = DockerBackend(url=docker_host, image=Image(name=tag))
        async with await backend.open(spec) as sandbox:
            return (await sandbox.exec(["sh", "-c", script])).stdout.decode().split()

    return asyncio.run(main())


def test_a_harness_lies_in_its_image_where_it_is_mounted_elsewhere(
    docker_host: str, store: ImageStore, tmp_path: Path
) -> None:
    mini = MiniHarness()
    tag = harness_images.build_harness(store, mini, cache=tmp_path)
    assert store.resolve(Image(name=tag)).holds == {mini.agent}
    spec = SandboxSpec(mounts=mini.mounts(tmp_path))
    script = f"sha256sum < {mini.agent}; grep -c {mini.agent} /proc/mounts; python3 -c 'print(1 + 1)'"
    digest, _, mounts, two = in_image(docker_host, tag, spec, script)
    assert digest == hashlib.sha256(mini.mounts(tmp_path)[0].source.read_bytes()).hexdigest()
    assert (mounts, two) == ("0", "2")


def test_a_second_harness_joins_the_first(store: ImageStore, tmp_path: Path) -> None:
    mini, other = MiniHarness(), MiniHarness()
    other.version = "other"
    both = harness_images.build_harness(
        store, other, cache=tmp_path, base=harness_images.build_harness(store, mini, cache=tmp_path)
    )
    assert store.resolve(Image(name=both)).holds == {mini.agent, other.agent}


def test_a_new_build_leaves_no_nameless_older_one(docker_host: str, tmp_path: Path) -> None:
    client = docker.DockerClient(docker_host)
    store, mini = ImageStore(client), MiniHarness()
    mini.version = "again"
    old = client.images.get(harness_images.build_harness(store, mini, cache=tmp_path))
    base = folder_image(store, tmp_path)
    new = client.images.get(harness_images.build_harness(store, mini, cache=tmp_path, base=base))
    assert old.id != new.id
    with pytest.raises(docker.errors.ImageNotFound):
        client.images.get(old.id)
    client.close()


def test_what_has_no_files_or_is_not_installed_makes_no_image(store: ImageStore, tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="'noop': it runs in any image"):
        harness_images.build_harness(store, NoopHarness(), cache=tmp_path)
    with pytest.raises(HarnessNotInstalled, match="clawgym install pi"):
        harness_images.build_harness(store, PiHarness(), cache=tmp_path)


def test_a_base_that_is_nowhere_is_refused(store: ImageStore, tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="in this engine or in a registry"):
        harness_images.build_harness(store, MiniHarness(), cache=tmp_path, base="clawgym-test.invalid/none:1")


def test_a_base_is_never_this_machine(store: ImageStore) -> None:
    with pytest.raises(SandboxError, match="Expected debootstrap or an image"):
        harness_images.build_base(store, harness_images.HOST)


def test_without_debootstrap_the_way_to_get_it_is_told(store: ImageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "has", lambda tag: False)
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    with pytest.raises(SandboxError, match="apt-get install debootstrap"):
        harness_images.build_base(store)


def test_the_command_builds_and_lists(
    docker_host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DOCKER_HOST", docker_host)
    (tmp_path / "Dockerfile").write_text(f"# {tmp_path}\nFROM scratch\nCOPY Dockerfile /\n")
    assert cli.main(["image", "build", "mini"]) == 0
    assert cli.main(["image", "build", str(tmp_path)]) == 0
    *_, mini, _, folder = capsys.readouterr().out.splitlines()
    assert (mini, folder[:14]) == ("clawgym/mini:1.0", "clawgym/build:")
    assert cli.main(["image", "list"]) == 0
    listed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["clawgym/mini:1.0", "/opt/clawgym/mini-1.0/agent.py"] in [[line[0], line[-1]] for line in listed]
    assert folder in [line[0] for line in listed]
    assert cli.main(["image", "build"]) == 2
    assert "clawgym image build pi" in capsys.readouterr().err


@pytest.mark.slow
def test_a_debian_is_made_without_a_registry(docker_host: str, store: ImageStore, tmp_path: Path) -> None:
    if shutil.which("debootstrap", path="/usr/sbin:/sbin") is None:
        pytest.skip("No debootstrap: apt-get install debootstrap.")
    tag = harness_images.build_harness(store, MiniHarness(), cache=tmp_path, base=harness_images.DEBOOTSTRAP)
    script = "python3 -c 'print(1 + 1)'; git --version | cut -c1-11; grep -c ' /usr ' /proc/mounts"
    assert in_image(docker_host, tag, SandboxSpec(), script) == ["2", "git", "version", "0"]
