"""What an examination finds, and the net under each of its checks.

Invariant: a check that breaks becomes a finding of its own; the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, computed_field

Topic: TypeAlias = Literal["machine", "sandbox", "model", "harnesses", "packages"]
Status: TypeAlias = Literal["ok", "optional", "warning", "problem"]
"""optional: not here, and only some things need it. warning: works, but less well. problem: no rollout with the bundled
harness runs here until it is mended."""


class Finding(BaseModel):
    """One line of the report."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    topic: Topic
    name: str
    status: Status
    found: str
    fix: str = ""
    """What to do about it, an exact command where there is one; empty where nothing is to be done."""

    @classmethod
    def of_error(cls, topic: Topic, name: str, error: Exception, *, status: Status = "problem") -> Finding:
        """Return what an error of the form "Expected X, got Y. Next step." says."""
        found, _, fix = " ".join(str(error).split()).partition(". ")
        return cls(topic=topic, name=name, status=status, found=found.rstrip("."), fix=fix.removeprefix("Run: "))


class Report(BaseModel):
    """What an examination came to."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    clawgym_version: str
    findings: tuple[Finding, ...]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def ready(self) -> bool:
        """Whether rollouts with the bundled harness run here."""
        return not self.having("problem")

    def having(self, status: Status) -> list[Finding]:
        """Return the findings of one status."""
        return [finding for finding in self.findings if finding.status == status]


def looked_at(
    topic: Topic, name: str, check: Callable[[], Iterable[Finding]], *, broken: Status = "warning"
) -> list[Finding]:
    """Return what a check finds.

    Args:
        name: of the finding, where the check itself breaks.
        broken: its status then.
    """
    findings: list[Finding] = []
    try:
        findings.extend(check())
    except Exception as error:  # whatever is wrong with this machine, the rest of it is looked at too
        finding = Finding.of_error(topic, name, error, status=broken)
        findings.append(finding.model_copy(update={"found": f"{type(error).__name__}: {finding.found}"}))
    return findings
