"""What this machine has for rollouts, found by looking and by opening a real sandbox: behind `clawgym doctor`.

Nothing is installed, built or left behind. Invariant: the report is `ready` exactly when rollouts with the bundled
harness run here, with the policy or engine that was asked about.
"""

from __future__ import annotations

import platform
from pathlib import Path

from clawgym_env._version import __version__
from clawgym_env.doctor import machine
from clawgym_env.doctor.findings import Finding as Finding
from clawgym_env.doctor.findings import Report as Report
from clawgym_env.doctor.findings import looked_at


def examine(*, cache: Path, policy: str, engine: str | None = None, private_docker: Path) -> Report:
    """Look at this machine.

    Args:
        cache: where harnesses and policies are kept.
        policy: what is to answer, by name or folder, where no engine is.
        engine: what is to answer instead, as "vllm:URL"; it is connected to.
        private_docker: the folder of the engine that `scripts/docker-up` starts.
    """
    findings = looked_at("machine", "system", machine.system, broken="problem")
    findings += looked_at("machine", "python", machine.python)
    if platform.system() != "Linux":  # the rest could not even be imported
        return Report(clawgym_version=__version__, findings=tuple(findings))
    from clawgym_env.doctor import equipment, sandboxes

    findings += looked_at("machine", "memory", lambda: machine.memory(equipment.memory_mb()))
    findings += looked_at("machine", "disk", lambda: machine.disk(cache))
    findings += looked_at("machine", "open files", machine.open_files)
    findings += looked_at("machine", "GPU", machine.gpus)
    findings += sandboxes.examine(private_docker / "docker.sock")
    if engine is not None:
        findings += looked_at("model", engine, lambda: equipment.engine(engine, cache), broken="problem")
    needed = engine is None
    findings += looked_at(
        "model",
        policy,
        lambda: equipment.policies(policy, cache, needed=needed),
        broken="problem" if needed else "optional",
    )
    findings += looked_at("harnesses", "node", lambda: equipment.node(cache))
    findings += looked_at("harnesses", "harnesses", lambda: equipment.harnesses(cache))
    findings += looked_at("packages", "extras", equipment.packages)
    return Report(clawgym_version=__version__, findings=tuple(findings))
