"""Nothing that an agent puts into its workspace shows it what is hidden, harms the host or holds up the grader."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from arena import CHECK, reward, rollout, rollouts, task

from clawgym_env.sandbox.base import SandboxBackend
from clawgym_env.tasks.task import Task

COPY = task(b"cat -- stolen* copy/* 2>/dev/null; echo; echo 0.0", name="check.sh")
"""Prints what the agent's files hold by the time the grader has its own."""


def seen_by_grader(backend: SandboxBackend, script: str, graded: Task = COPY) -> str:
    found = rollout(backend, script, graded)
    assert found.grade is not None, found.error
    return found.grade.output


@pytest.mark.parametrize("kind", ["-s", ""], ids=["symbolic", "hard"])
def test_a_link_to_a_file_of_the_host_does_not_carry_it_to_the_grader(
    backend: SandboxBackend, kind: str, tmp_path: Path
) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("host secret")
    targets = (secret, "/etc/shadow", "/etc/ssh/sshd_config", "/proc/self/environ", "/proc/1/environ", "/root/.bashrc")
    up = "/.." * 12
    links = [f"ln {kind} {target} stolen{number}" for number, target in enumerate(targets)]
    links += [
        f"ln {kind} $PWD{up}{secret} stolen-up",
        f"mkdir -p copy; ln -s / copy/root; ln -s {tmp_path} stolen-folder",
    ]
    shown = seen_by_grader(backend, "; ".join(links) + "; true")
    assert "host secret" not in shown
    assert "root:" not in shown
    assert "PYTHONSAFEPATH" not in shown


def test_a_link_to_a_hidden_file_passes_for_no_answer(backend: SandboxBackend) -> None:
    for link in (
        "ln -s reward/expected.txt answer.txt",
        "mkdir -p reward; echo 7 > reward/expected.txt; ln reward/expected.txt answer.txt",
    ):
        assert reward(backend, link, task()) == 0.0


def test_a_folder_that_is_a_link_does_not_carry_hidden_files_out(backend: SandboxBackend) -> None:
    script = "mkdir -p elsewhere; ln -s elsewhere reward; ln -s . copy"
    check = task(CHECK + b"\nprint(float((root / 'elsewhere' / 'expected.txt').exists()))\n")
    assert reward(backend, script, check) == 0.0


@pytest.mark.parametrize("where", ["fresh", "same"])
def test_a_daemon_of_the_agent_does_not_live_to_see_the_hidden_files(backend: SandboxBackend, where: str) -> None:
    script = r"""
cat > daemon.py <<'END'
import os, signal, time
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
for _ in range(2):
    if os.fork(): os._exit(0)
    os.setsid()
open("alive", "w").close()
while True:
    for parent, folders, files in os.walk("."):
        if "expected.txt" in files:
            open("answer.txt", "w").write("42")
    time.sleep(0.001)
END
python3 daemon.py; while [ ! -e alive ]; do sleep 0.01; done
(trap '' TERM HUP INT; while sleep 0.01; do [ -e reward ] && echo 42 > answer.txt; done) >/dev/null 2>&1 &
"""
    slow = task(b"sleep 0.5\n[ -e answer.txt ] && echo 1.0 || echo 0.0\n", name="check.sh")
    found = rollout(backend, script, slow.model_copy(update={"grade_in": where}))
    assert found.grade is not None, found.error
    assert found.grade.reward == 0.0


def test_an_agent_that_watches_for_the_grader_sees_nothing_before_its_end(backend: SandboxBackend) -> None:
    script = r"""
find / \( -path /proc -o -path /usr \) -prune -o -name '[e]xpected.txt' -print -o -name '[c]heck.py' -print 2>/dev/null
ls /tmp; env; cat /proc/*/environ /proc/*/cmdline 2>/dev/null | tr '\0' '\n' | grep -v grep
"""
    shown = rollout(backend, script, task()).harness_output
    for word in ("expected.txt", "check.py", "clawgym-grader", "hidden answer", "reward"):
        assert word not in shown


@pytest.mark.parametrize("where", ["fresh", "same"])
def test_odd_files_do_not_hold_up_the_grader_or_fill_the_disk(backend: SandboxBackend, where: str) -> None:
    script = r"""
mkfifo fifo answer.txt; mkdir -p reward; mkfifo reward/check.py reward/expected.txt
truncate -s 1T sparse; mknod device b 8 0; mknod zero c 1 5
python3 - <<'END'
import os, socket
socket.socket(socket.AF_UNIX).bind("socket")
open(b"not-utf-8-\xff\xfe", "w").write("x"); open("new\nline", "w").close(); open("-rf", "w").close()
os.mkdir("deep"); os.chdir("deep")
for _ in range(600):
    os.mkdir("d"); os.chdir("d")
END
chmod 4755 fifo 2>/dev/null; ln -s loop loop; mkdir locked; touch locked/file; chmod 0 locked; true
"""
    assert reward(backend, script, task(grade_in=where)) == 0.0
    kept = script.replace("mkfifo fifo answer.txt", "mkfifo fifo; echo 42 > answer.txt")
    assert reward(backend, kept, task(grade_in=where)) == 1.0


def test_output_without_end_of_a_checked_program_earns_nothing(backend: SandboxBackend) -> None:
    check = task(b"timeout 1 bash program.sh; echo 0.0", name="check.sh")
    found = rollout(backend, "echo 'yes 1.0' > program.sh", check)
    assert found.grade is None, "a verdict that is not whole is none"
    assert found.stop_reason == "grader_error"
    assert len(found.error) < 10_000
    to_stderr = task(b"timeout 1 bash program.sh >&2; echo 0.0", name="check.sh")
    found = rollout(backend, "echo 'yes 1.0' > program.sh", to_stderr)
    assert found.grade is None or found.grade.reward == 0.0


def test_a_fork_bomb_in_a_checked_program_ends_with_the_grading(backend: SandboxBackend) -> None:
    check = task(b"timeout -k 1 2 python3 bomb.py; echo 0.0", name="check.sh")
    bomb = r"""
cat > bomb.py <<'END'
import os
os.setsid()
while True:
    try: os.fork()
    except OSError: pass
END
"""
    found = rollout(backend, bomb, check)
    assert found.grade is None or found.grade.reward == 0.0
    assert reward(backend, "echo 42 > answer.txt", task()) == 1.0, "the machine works on"


def test_two_rollouts_at_once_do_not_meet(backend: SandboxBackend) -> None:
    mark = f"mark-{os.getpid()}"
    leave = f"echo {mark} | tee /tmp/{mark} $HOME/{mark} /dev/shm/{mark} > {mark}; exec -a {mark} sleep 2"
    listen = f"""
python3 -c '
import socket, time
for family, name in ((socket.AF_UNIX, "\\0{mark}"), (socket.AF_INET, ("127.0.0.1", 9999))):
    s = socket.socket(family); s.bind(name); s.listen()
time.sleep(2)' & {leave}"""
    search = f"""
sleep 1; find / -path /proc -prune -o -name '{mark}' -print 2>/dev/null
grep -l {mark} /proc/*/cmdline 2>/dev/null; grep {mark} /proc/net/unix
python3 -c '
import socket
for family, name in ((socket.AF_UNIX, "\\0{mark}"), (socket.AF_INET, ("127.0.0.1", 9999))):
    try: socket.socket(family).connect(name); print("met {mark}")
    except OSError: pass'
"""
    found = rollouts(backend, [listen, search], task())
    assert [one.stop_reason for one in found] == ["completed", "completed"]
    lines = [line for line in found[1].harness_output.splitlines() if mark in line and "/proc/" not in line]
    assert lines == []


def test_sockets_of_the_host_cannot_be_reached(backend: SandboxBackend) -> None:
    name = f"\0clawgym-adversary-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as abstract, socket.create_server(("127.0.0.1", 0)) as loopback:
        abstract.bind(name)
        abstract.listen()
        port = loopback.getsockname()[1]
        script = f"""
python3 -c '
import socket
unix, inet = socket.AF_UNIX, socket.AF_INET
for family, target in ((unix, "\\0{name[1:]}"), (inet, ("127.0.0.1", {port})), (inet, ("10.0.0.1", 80))):
    s = socket.socket(family); s.settimeout(1)
    try: s.connect(target); print("reached", target)
    except OSError: print("refused")
'"""
        assert rollout(backend, script, task()).harness_output.split() == ["refused"] * 3
