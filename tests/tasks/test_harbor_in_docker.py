"""A Harbor task from its folder to its reward, in a container built from its own Dockerfile."""

import re
import shutil
import subprocess
from pathlib import Path

from clawgym_env.sandbox.docker import DockerBackend
from clawgym_env.tasks.harbor import load_harbor
from clawgym_env.tasks.proving import prove

CONFIG = """
version = "1.0"
[verifier]
env = { WANTED = "12" }
[environment]
memory = "256M"
storage = "64M"
"""
TEST = """
[ "$(cat sum.txt)" = "$WANTED" ] && [ "$(cat /opt/tool)" = "$(cat /tests/data/tool)" ] && reward=1 || reward=0
echo "{\\"reward\\": $reward}" > /logs/verifier/reward.json
"""


def make_task(folder: Path) -> Path:
    """Write a task whose image holds a few programs of this machine: nothing has to be downloaded."""
    root = folder / "environment" / "root"
    programs = [str(shutil.which(name)) for name in ("bash", "sh", "rm", "cat", "env")]
    listed = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=True).stdout
    for path in {*re.findall(r"(/\S+) \(", listed)}:
        (root / path[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, root / path[1:])
    (root / "bin").mkdir(exist_ok=True)
    for path in programs:
        shutil.copy(path, root / "bin")
    (folder / "environment" / "Dockerfile").write_text("FROM scratch\nCOPY root /\nENV PATH=/bin\nWORKDIR /srv/work\n")
    for name, text in {
        "task.toml": CONFIG,
        "instruction.md": "Write 12 to sum.txt and install the tool.",
        "tests/test.sh": TEST,
        "tests/data/tool": "the tool\n",
        "solution/solve.sh": 'echo 12 > sum.txt\ncat "${0%/*}/tool" > /opt/tool\n',
        "solution/tool": "the tool\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_nothing_earns_nothing_and_the_solution_everything(tmp_path: Path, docker_host: str) -> None:
    (make_task(tmp_path / "one") / "environment" / "root" / "opt").mkdir()
    (tmp_path / "one" / "environment" / "root" / "opt" / ".keep").touch()
    tasks = load_harbor(tmp_path / "one")
    assert tasks[0].workdir == "/srv/work"
    proofs = {proof.player: proof for proof in prove(tasks, sandbox=DockerBackend(url=docker_host), jobs=1)}
    assert proofs["noop"].score == 0.0, proofs["noop"]
    assert proofs["oracle"].score == 1.0, proofs["oracle"]
