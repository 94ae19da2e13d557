"""The filter is run here by a small interpreter, for both processors; the contract tests try it on the real kernel,
those of Docker the profile."""

from __future__ import annotations

import json
import struct

import pytest

from clawgym_env.errors import SandboxError
from clawgym_env.sandbox.seccomp import docker_profile, seccomp_filter

ALLOW, KILL, EPERM, ENOSYS, NO_FAMILY = 0x7FFF0000, 0x80000000, 0x50001, 0x50026, 0x50061
ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def verdict(machine: str, number: int, argument: int = 0, second: int = 0, *, arch: int | None = None) -> int:
    """Run the program on one system call."""
    data = struct.pack("=IIQ6Q", number, ARCH[machine] if arch is None else arch, 0, argument, second, 0, 0, 0, 0)
    program = list(struct.iter_unpack("=HBBI", seccomp_filter(machine)))
    accumulator = position = 0
    while True:
        code, if_true, if_false, value = program[position]
        position += 1
        if code == 0x06:
            return value
        if code == 0x20:
            accumulator = struct.unpack_from("=I", data, value)[0]
            continue
        holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[code]
        position += if_true if holds else if_false


@pytest.mark.parametrize(
    ("machine", "denied"), [("x86_64", [101, 165, 272, 308, 321, 425]), ("aarch64", [117, 40, 97, 268, 280, 425])]
)
def test_dangerous_calls_are_denied(machine: str, denied: list[int]) -> None:
    assert {verdict(machine, number) for number in denied} == {EPERM}


@pytest.mark.parametrize(("machine", "socket", "clone"), [("x86_64", 41, 56), ("aarch64", 198, 220)])
def test_sockets_and_clones_are_judged_by_their_arguments(machine: str, socket: int, clone: int) -> None:
    assert [verdict(machine, socket, family) for family in (1, 2, 10, 16)] == [ALLOW] * 4
    assert [verdict(machine, socket, family) for family in (38, 40)] == [NO_FAMILY] * 2
    assert verdict(machine, socket, 40 | 7 << 32) == NO_FAMILY
    assert verdict(machine, clone, 0x01200011) == ALLOW
    assert [verdict(machine, clone, 1 << bit) for bit in (17, 25, 26, 27, 28, 29, 30)] == [EPERM] * 7
    assert verdict(machine, 435) == ENOSYS


@pytest.mark.parametrize(
    ("machine", "by_first", "by_second"),
    [("x86_64", [302, 142, 144, 314, 203], [141, 251]), ("aarch64", [261, 118, 119, 274, 122], [140, 30])],
)
def test_the_first_process_cannot_be_starved(machine: str, by_first: list[int], by_second: list[int]) -> None:
    for number in by_first:
        assert verdict(machine, number, 1) == verdict(machine, number, 1 | 7 << 32) == EPERM
        assert verdict(machine, number, 0, 1) == verdict(machine, number, 12, 1) == ALLOW
    user = dict(zip(by_second, (2, 3), strict=True))
    for number in by_second:
        assert verdict(machine, number, 0, 1) == verdict(machine, number, user[number], 0) == EPERM
        assert verdict(machine, number, 0, 0) == verdict(machine, number, 1, 12) == ALLOW


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_ordinary_calls_pass(machine: str) -> None:
    ordinary = {"x86_64": [0, 1, 2, 9, 57, 59, 202, 257, 281, 434], "aarch64": [56, 63, 64, 93, 221, 222, 98, 434]}
    assert {verdict(machine, number) for number in ordinary[machine]} == {ALLOW}


def test_a_foreign_architecture_is_killed_and_x32_refused() -> None:
    assert verdict("x86_64", 41, 2, arch=0x40000003) == KILL
    assert verdict("x86_64", 41 | 0x40000000, 40) == ENOSYS


def test_an_unknown_processor_is_an_error() -> None:
    with pytest.raises(SandboxError, match="riscv64"):
        seccomp_filter("riscv64")


def test_the_profile_for_docker_says_what_the_filter_says() -> None:
    profile = json.loads(docker_profile())
    assert profile["defaultAction"] == "SCMP_ACT_ALLOW"
    unconditional = {
        name: rule["errnoRet"] for rule in profile["syscalls"] if not rule["args"] for name in rule["names"]
    }
    assert {"ptrace", "mount", "unshare", "setns", "bpf", "io_uring_setup"} <= unconditional.keys()
    assert "socket" not in unconditional
    assert "clone" not in unconditional
    assert unconditional.pop("clone3") == 38
    assert set(unconditional.values()) == {1}

    def judged(name: str, *arguments: int) -> int:
        """Apply the rules to a call's arguments, as libseccomp does."""
        rules = [rule for rule in profile["syscalls"] if rule["names"] == [name]]
        fits = [
            rule["errnoRet"]
            for rule in rules
            for test in rule["args"]
            if test["op"] == "SCMP_CMP_MASKED_EQ" and arguments[test["index"]] & test["value"] == test["valueTwo"]
        ]
        return max(fits, default=0)

    for argument in (1, 2, 10, 16, 38, 40, 40 | 7 << 32):
        expected = verdict("x86_64", 41, argument)
        assert judged("socket", argument) == (0 if expected == ALLOW else expected & 0xFFFF)
    for argument in (0x01200011, *(1 << bit for bit in range(32))):
        expected = verdict("x86_64", 56, argument)
        assert judged("clone", argument) == (0 if expected == ALLOW else expected & 0xFFFF)
    for name, number in {"prlimit64": 302, "sched_setscheduler": 144, "setpriority": 141, "ioprio_set": 251}.items():
        for pair in ((0, 0), (1, 0), (0, 1), (2, 0), (3, 0), (1, 1)):
            expected = verdict("x86_64", number, *pair)
            assert judged(name, *pair) == (0 if expected == ALLOW else expected & 0xFFFF)
