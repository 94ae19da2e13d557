"""Images: made with and without a registry, built once, and never from what is no longer there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import docker
import pytest
import requests
from docker.types import LogConfig

from clawgym_env.errors import SandboxError
from clawgym_env.sandbox.base import Image
from clawgym_env.sandbox.build_inputs import BuildInputs
from clawgym_env.sandbox.images import ImageStore, ResolvedImage


@pytest.fixture
def client(docker_host: str) -> Iterator[docker.DockerClient]:
    client = docker.DockerClient(docker_host)
    yield client
    client.close()


@pytest.fixture
def store(client: docker.DockerClient) -> ImageStore:
    return ImageStore(client)


def run(client: docker.DockerClient, image: ResolvedImage, command: Sequence[str]) -> str:
    """Return what a command prints in a container of an image, shown what it needs."""
    output: bytes = client.containers.run(
        image.tag,
        list(command),
        network_mode="none",
        read_only=True,
        remove=True,
        stderr=True,
        log_config=LogConfig(type="json-file"),
        volumes=[f"{mount.source}:{mount.target}:ro" for mount in image.mounts],
    )
    return output.decode()


def folder(path: Path, dockerfile: str, **files: str) -> Image:
    path.mkdir(exist_ok=True)
    for name, text in {"Dockerfile": dockerfile, **files}.items():
        (path / name).write_text(text)
    return Image(build=path)


def test_the_host_image_has_programs_but_nothing_else_of_the_host(
    client: docker.DockerClient, store: ImageStore, tmp_path: Path
) -> None:
    script = f"""
python3 -c 'import ssl, sqlite3; print("python")'
bash -c 'echo bash'
touch /usr/planted 2>&1
ls {tmp_path} /etc/shadow /etc/ssl/private /etc/ssh 2>&1
ls -A /home /opt /var | grep -v :
cat /etc/passwd
"""
    lines = run(client, store.resolve(None), ["sh", "-c", script]).split("\n")
    assert lines[:2] == ["python", "bash"]
    assert "Read-only file system" in lines[2]
    assert all("No such file or directory" in line for line in lines[3:7])
    assert lines[7:11] == ["", "", "tmp", "root:x:0:0:root:/root:/bin/bash"]


def test_the_host_image_is_made_once(client: docker.DockerClient, store: ImageStore) -> None:
    tag = store.resolve(None).tag
    made = client.images.get(tag).id
    assert ImageStore(client).resolve(None).tag == tag
    assert client.images.get(tag).id == made


def test_python_starts_in_an_image_that_has_nothing(
    client: docker.DockerClient, store: ImageStore, tmp_path: Path
) -> None:
    image = store.resolve(folder(tmp_path / "task", "FROM scratch\nCOPY note /note\n", note="hello"))
    code = "import _socket, ctypes, fcntl, marshal, resource, select, struct; print(open('/note').read())"
    assert run(client, image, [*image.python, "-I", "-S", "-B", "-c", code]) == "hello\n"


def test_a_folder_is_built_once_and_again_when_it_changes(
    client: docker.DockerClient, store: ImageStore, tmp_path: Path
) -> None:
    task = folder(tmp_path / "task", "FROM scratch\nCOPY note /note\n", note=str(tmp_path))
    first = store.resolve(task)
    built = client.images.get(first.tag).id
    twin = folder(tmp_path / "twin", "FROM scratch\nCOPY note /note\n", note=str(tmp_path))
    assert ImageStore(client).resolve(twin) == first, "equal contents are one image"
    assert client.images.get(first.tag).id == built
    changed = ImageStore(client).resolve(folder(tmp_path / "task", "FROM scratch\nCOPY note /note\n", note="other"))
    assert changed.tag != first.tag


def test_many_that_ask_at_once_share_one_build(
    client: docker.DockerClient, store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds: list[str] = []
    build = store.build
    monkeypatch.setattr(store, "build", lambda context, tag: (builds.append(tag), build(context, tag)))
    task = folder(tmp_path / "task", "FROM scratch\nCOPY note /note\n", note=f"shared {tmp_path}")
    with ThreadPoolExecutor(8) as pool:
        tags = {image.tag for image in pool.map(store.resolve, [task] * 8)}
    assert [*tags] == builds


def test_what_a_dockerignore_names_is_neither_sent_nor_hashed(
    client: docker.DockerClient, store: ImageStore, tmp_path: Path
) -> None:
    files = {".dockerignore": "# big\nsecret\n", "note": "hello", "secret": "1"}
    task = folder(tmp_path / "task", "FROM scratch\nCOPY . /\n", **files)
    image = store.resolve(task)
    code = "import os; print(os.path.exists('/note'), os.path.exists('/secret'))"
    assert run(client, image, [*image.python, "-c", code]) == "True False\n"
    (tmp_path / "task/secret").write_text("2")
    assert ImageStore(client).resolve(task).tag == image.tag


def test_a_failed_build_says_what_the_builder_said(store: ImageStore, tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match=r"to build, got:(.|\n)*nowhere"):
        store.resolve(folder(tmp_path / "task", "FROM scratch\nCOPY nowhere /\n"))


def test_a_folder_without_a_dockerfile_is_refused(store: ImageStore, tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="Expected a Dockerfile in"):
        store.resolve(Image(build=tmp_path))


def test_an_image_that_is_nowhere_is_refused_with_what_to_do(store: ImageStore) -> None:
    with pytest.raises(SandboxError, match=r"'clawgym-test.invalid/none:1' in this engine.*docker load"):
        store.resolve(Image(name="clawgym-test.invalid/none:1"))


def test_certificates_reach_a_build_but_not_the_hash_nor_the_dockerfile(
    client: docker.DockerClient, tmp_path: Path
) -> None:
    bundle = tmp_path / "ca.pem"
    bundle.write_text("certificates\n")
    task = folder(tmp_path / "task", f"# {tmp_path}\nFROM scratch AS one\nfrom scratch\nCOPY --from=one / /\n")
    store = ImageStore(client, inputs=BuildInputs(ca_bundle=bundle))
    image = store.resolve(task)
    code = "import os; print(open('/.clawgym-ca-bundle.pem').read(), os.environ.get('PIP_CERT'))"
    assert run(client, image, [*image.python, "-c", code]) == "certificates\n None\n"
    assert sorted(file.name for file in (tmp_path / "task").iterdir()) == ["Dockerfile"]
    assert ImageStore(client).resolve(task).tag == image.tag


class GoneEngine:
    """A client whose engine has ended. A real one leaves an unclosed socket behind."""

    @property
    def images(self) -> object:
        raise requests.ConnectionError("No such file or directory")


def test_an_engine_that_is_gone_is_a_sandbox_error() -> None:
    with pytest.raises(SandboxError, match=r"Expected the Docker engine.*No such file"):
        ImageStore(GoneEngine()).resolve(None)
