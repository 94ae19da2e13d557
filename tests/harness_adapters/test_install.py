"""The install cache: whole or not at all, one installer at a time, and errors that show what npm or pip said."""

from __future__ import annotations

import subprocess
import threading
import zipfile
from pathlib import Path

import pytest

from clawgym_env.errors import HarnessError
from harness_adapters.node import node_folder
from harness_adapters.npm import NpmProduct
from harness_adapters.pypi import PypiProduct, host_python
from harness_adapters.staging import staged, tail

PRODUCT = NpmProduct("toy", "1.2.3", "@toy/agent", "node_modules/*/cli.js")

# Stands in for node: asked to run npm it "installs", asked to run the product it prints a version.
NODE = """#!/bin/sh
case "$1" in
  */npm-cli.js)
    echo "$@" > log; echo x >> "$(dirname "$0")/runs"
    %(npm)s ;;
  */program) echo "toy %(version)s" ;;
esac
"""
UNPACK = "mkdir -p node_modules/toy && touch node_modules/toy/cli.js"


def fake_node(cache: Path, npm: str = UNPACK, version: str = "1.2.3") -> Path:
    program = node_folder(cache) / "bin/node"
    program.parent.mkdir(parents=True)
    program.write_text(NODE % {"npm": npm, "version": version})
    program.chmod(0o755)
    return program


def put(cache: Path) -> list[str]:
    lines: list[str] = []
    PRODUCT.install(cache, lines.append)
    return lines


def test_a_product_is_installed_without_its_install_scripts_and_once(tmp_path: Path) -> None:
    node = fake_node(tmp_path)
    first, second = put(tmp_path), put(tmp_path)
    folder = PRODUCT.folder(tmp_path)
    assert folder == tmp_path / "harnesses/toy-1.2.3"
    assert (folder / "program").readlink() == Path("node_modules/toy/cli.js")
    command = (folder / "log").read_text()
    assert "--ignore-scripts" in command
    assert "@toy/agent@1.2.3" in command
    assert (node.parent / "runs").read_text() == "x\n"
    assert "toy-1.2.3: 0 MB" in first[-1]
    assert "is installed" in second[-1]


@pytest.mark.parametrize(
    ("npm", "version", "words"),
    [
        ("seq 99; echo 'npm error E404' >&2; exit 1", "1.2.3", "exit code 1(.|\n)*npm error E404"),
        ("true", "1.2.3", "Expected a node_modules/[*]/cli.js in @toy/agent@1.2.3, got none"),
        (UNPACK, "9.9.9", "Expected toy --version to print 1.2.3, got: toy 9.9.9"),
    ],
)
def test_a_failed_install_says_why_and_leaves_nothing(tmp_path: Path, npm: str, version: str, words: str) -> None:
    fake_node(tmp_path, npm, version)
    with pytest.raises(HarnessError, match=words):
        put(tmp_path)
    assert [path.name for path in (tmp_path / "harnesses").iterdir()] == [".toy-1.2.3.lock"]


def test_the_first_build_that_starts_here_is_taken(tmp_path: Path) -> None:
    def build(name: str, does: str) -> str:
        toy = f"node_modules/{name}/toy"
        return f"mkdir -p node_modules/{name}; echo '#!/bin/sh' > {toy}; echo '{does}' >> {toy}; chmod 755 {toy}; "

    fake_node(tmp_path, build("toy-x64", "kill -ILL $$") + build("toy-x64-baseline", "echo 1.2.3"))
    product = NpmProduct("toy", "1.2.3", "@toy/agent", "node_modules/toy-*/toy", native=True)
    product.install(tmp_path, print)
    assert (product.folder(tmp_path) / "program").readlink() == Path("node_modules/toy-x64-baseline/toy")


def test_installers_at_the_same_time_do_the_work_once(tmp_path: Path) -> None:
    node = fake_node(tmp_path, f"sleep 0.3; {UNPACK}")
    threads = [threading.Thread(target=put, args=(tmp_path,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (node.parent / "runs").read_text() == "x\n"
    assert (PRODUCT.folder(tmp_path) / "program").exists()


def test_a_stage_becomes_the_target_only_when_the_block_ends_well(tmp_path: Path) -> None:
    target = tmp_path / "a/b"
    with pytest.raises(KeyError), staged(target, print):
        raise KeyError("the installer failed")
    assert not target.exists()
    stale = target.with_name(".b-killed")
    stale.mkdir()
    with staged(target, print) as stage:
        assert stage is not None
        assert not stale.exists()
        (stage / "file").touch()
        assert not target.exists()
    assert (target / "file").exists()
    with staged(target, print) as stage:
        assert stage is None


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(HarnessError, match="Expected to write to the cache"):
        PRODUCT.install(tmp_path / "file", print)


def test_the_end_of_an_output_is_kept() -> None:
    assert tail(b"1\n2\n3\n", lines=2) == "2\n3"
    assert tail(b"") == "no output"


def toy_wheel(folder: Path, code: str) -> Path:
    """Write a wheel with one module, and the lock file of a product that is nothing else."""
    wheel = folder / "toy-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("toy.py", code)
        archive.writestr("toy-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
        archive.writestr("toy-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("toy-1.0.dist-info/RECORD", "")
    lock = folder / "toy_lock.txt"
    lock.write_text(f"{wheel}\n")
    return lock


def test_a_python_product_runs_on_the_sandboxs_python_and_its_own_packages_alone(tmp_path: Path) -> None:
    extra = tmp_path / "extra.py"
    extra.write_text("WORD = 'ours'\n")
    lock = toy_wheel(
        tmp_path, "import extra, sys\n\ndef main():\n    print(extra.WORD, sys.argv[1:], sys.flags.isolated)\n"
    )
    product = PypiProduct("toy", "1.0", lock, "toy.main", modules=(extra,))
    lines: list[str] = []
    product.install(tmp_path, lines.append)
    product.install(tmp_path, lines.append)
    folder = product.folder(tmp_path)
    assert "fetching" in lines[0]
    assert "MB in" in lines[1]
    assert "is installed" in lines[2]
    assert list(folder.glob("packages/__pycache__/toy.*.pyc"))
    work = tmp_path / "work"
    work.mkdir()
    (work / "extra.py").write_text("WORD = 'the task's'\n")
    argv = [host_python(), *product.argv[1:-1], folder / "program", "x"]
    done = subprocess.run(argv, cwd=work, env={"PYTHONPATH": str(work)}, capture_output=True, text=True, check=True)
    assert done.stdout == "ours ['x'] 1\n"
    assert product.argv[-1] == f"{product.mounts(tmp_path)[0].target}/program"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def main(): raise SystemExit('no build')", "Expected toy --help to work here, got: no build"),
        (None, "Expected pip to install toy_lock.txt(.|\n)*toy-9.9"),
    ],
)
def test_a_python_product_that_fails_says_why_and_leaves_nothing(tmp_path: Path, code: str | None, words: str) -> None:
    lock = toy_wheel(tmp_path, code or "")
    if code is None:
        lock.write_text(f"{tmp_path}/toy-9.9-py3-none-any.whl\n")
    product = PypiProduct("toy", "1.0", lock, "toy.main")
    with pytest.raises(HarnessError, match=words):
        product.install(tmp_path, print)
    assert [path.suffix for path in (tmp_path / "harnesses").iterdir()] == [".lock"]
