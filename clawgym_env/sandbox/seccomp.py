"""The system calls a sandbox may not make: one table, as a BPF program for bubblewrap and as a profile for Docker.

Installed just before the supervisor starts, so that every process of the sandbox inherits it. Invariant: no call that
makes namespaces, mounts, reads other processes' memory, slows or starves the first process, or opens a socket family
which network namespaces do not cover (AF_VSOCK reaches the hypervisor, AF_ALG the kernel's crypto) succeeds inside.
"""

from __future__ import annotations

import json
import platform
import struct
from collections.abc import Mapping

from clawgym_env.errors import SandboxError

_ALLOW = 0x7FFF0000
_KILL_PROCESS = 0x80000000
_ERRNO = 0x00050000
_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97

_NR, _ARCH, _ARG0 = 0, 4, 16
"""Offsets in `struct seccomp_data`; the low half of an argument comes first on both machines."""
_LOAD, _JUMP_EQ, _JUMP_GE, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06

_AF_ALG, _AF_VSOCK = 38, 40
_NEW_NAMESPACE = 0x7E020000
"""Every CLONE_NEW* flag that `clone` takes (CLONE_NEWTIME is only for `unshare` and `clone3`)."""
_LOW_HALF = 0xFFFFFFFF
"""What the kernel reads of an `int` argument; a comparison of all 64 bits is walked around by any of the others."""
_X32 = 0x40000000

_SHARED = {
    "pidfd_getfd": 438, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442,
}  # fmt: skip
"""Calls newer than the tables' split have one number everywhere."""
_NUMBERS = {
    "x86_64": {
        "socket": 41, "clone": 56, "clone3": 435, "ptrace": 101, "pivot_root": 155, "chroot": 161, "mount": 165,
        "umount2": 166, "add_key": 248, "request_key": 249, "keyctl": 250, "unshare": 272, "perf_event_open": 298,
        "open_by_handle_at": 304, "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312,
        "bpf": 321, "userfaultfd": 323,
    },
    "aarch64": {
        "socket": 198, "clone": 220, "clone3": 435, "ptrace": 117, "pivot_root": 41, "chroot": 51, "mount": 40,
        "umount2": 39, "add_key": 217, "request_key": 218, "keyctl": 219, "unshare": 97, "perf_event_open": 241,
        "open_by_handle_at": 265, "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272,
        "bpf": 280, "userfaultfd": 282,
    },
}  # fmt: skip
_FIRST_PROCESS = 1
"""The supervisor: whoever starves it, or takes its limits away, keeps the host from killing and grading."""
_ON_OTHERS: Mapping[str, tuple[Mapping[str, int], tuple[tuple[int, int], ...]]] = {
    "prlimit64": ({"x86_64": 302, "aarch64": 261}, ((0, _FIRST_PROCESS),)),
    "sched_setparam": ({"x86_64": 142, "aarch64": 118}, ((0, _FIRST_PROCESS),)),
    "sched_setscheduler": ({"x86_64": 144, "aarch64": 119}, ((0, _FIRST_PROCESS),)),
    "sched_setattr": ({"x86_64": 314, "aarch64": 274}, ((0, _FIRST_PROCESS),)),
    "sched_setaffinity": ({"x86_64": 203, "aarch64": 122}, ((0, _FIRST_PROCESS),)),
    "setpriority": ({"x86_64": 141, "aarch64": 140}, ((1, _FIRST_PROCESS), (0, 2))),
    "ioprio_set": ({"x86_64": 251, "aarch64": 30}, ((1, _FIRST_PROCESS), (0, 3))),
}
"""Calls that act on other processes: their numbers, and each argument (its index, its value) that is refused. What the
last two refuse besides is to name every process of a user."""
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def seccomp_filter(machine: str | None = None) -> bytes:
    """Return the BPF program for this machine (or `machine`, as `platform.machine()` names it).

    Raises:
        SandboxError: no table of system calls for this processor.
    """
    machine = machine or platform.machine()
    if machine not in _NUMBERS:
        known = ", ".join(_NUMBERS)
        raise SandboxError(f"Expected a processor of {known}, got {machine!r}. Add its system calls to this table.")
    numbers = dict(_NUMBERS[machine])
    socket, clone, clone3 = (numbers.pop(name) for name in ("socket", "clone", "clone3"))
    program = [
        # A foreign architecture numbers its calls differently: it would walk around everything below.
        _step(_LOAD, _ARCH),
        _step(_JUMP_EQ, _AUDIT_ARCH[machine], 1, 0),
        _step(_RETURN, _KILL_PROCESS),
        _step(_LOAD, _NR),
    ]
    if machine == "x86_64":
        program += [_step(_JUMP_GE, _X32, 0, 1), _step(_RETURN, _ERRNO | _ENOSYS)]
    for number in sorted({*numbers.values(), *_SHARED.values()}):
        program += [_step(_JUMP_EQ, number, 0, 1), _step(_RETURN, _ERRNO | _EPERM)]
    # clone3 hides its flags behind a pointer; ENOSYS makes every C library fall back to clone.
    program += [_step(_JUMP_EQ, clone3, 0, 1), _step(_RETURN, _ERRNO | _ENOSYS)]
    for per_machine, refused in _ON_OTHERS.values():
        program += [_step(_JUMP_EQ, per_machine[machine], 0, 3 * len(refused) + 1)]
        for index, value in refused:
            program += [_step(_LOAD, _ARG0 + 8 * index), _step(_JUMP_EQ, value, 0, 1), _step(_RETURN, _ERRNO | _EPERM)]
        program += [_step(_RETURN, _ALLOW)]
    program += [
        _step(_JUMP_EQ, clone, 0, 4),
        _step(_LOAD, _ARG0),
        _step(_JUMP_SET, _NEW_NAMESPACE, 0, 1),
        _step(_RETURN, _ERRNO | _EPERM),
        _step(_RETURN, _ALLOW),
    ]
    program += [
        _step(_JUMP_EQ, socket, 0, 4),
        _step(_LOAD, _ARG0),
        _step(_JUMP_EQ, _AF_VSOCK, 1, 0),
        _step(_JUMP_EQ, _AF_ALG, 0, 1),
        _step(_RETURN, _ERRNO | _EAFNOSUPPORT),
        _step(_RETURN, _ALLOW),
    ]
    return b"".join(program)


def docker_profile() -> str:
    """Return the same rules as a seccomp profile in Docker's JSON; the engine's own numbers the calls."""
    judged = {"socket", "clone", "clone3"}
    denied = sorted({*_SHARED, *(name for numbers in _NUMBERS.values() for name in numbers)} - judged)
    flags = [1 << bit for bit in range(32) if _NEW_NAMESPACE & 1 << bit]
    rules = [_rule(denied, _EPERM), _rule(["clone3"], _ENOSYS)]
    rules += [_rule(["clone"], _EPERM, mask=flag, equals=flag) for flag in flags]
    rules += [_rule(["socket"], _EAFNOSUPPORT, mask=_LOW_HALF, equals=family) for family in (_AF_ALG, _AF_VSOCK)]
    for name, (_, refused) in _ON_OTHERS.items():
        rules += [_rule([name], _EPERM, index=index, mask=_LOW_HALF, equals=value) for index, value in refused]
    # Only the native architecture is named: calls numbered for another end the process.
    return json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": rules})


def _rule(names: list[str], error: int, *, index: int = 0, mask: int = 0, equals: int = 0) -> dict[str, object]:
    """Return a rule that fails calls with an error; with a mask, those of which one argument fits."""
    fits = {"index": index, "value": mask, "valueTwo": equals, "op": "SCMP_CMP_MASKED_EQ"}
    return {"names": names, "action": "SCMP_ACT_ERRNO", "errnoRet": error, "args": [fits] if mask else []}
