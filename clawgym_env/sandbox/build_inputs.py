"""What image builds need on this machine and no image may depend on: the address and the certificates of a proxy.

Invariant: a Dockerfile on disk is never changed, the hash that names an image does not see these inputs, and what an
image runs later has none of these variables set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from clawgym_env.errors import SandboxError

_BUNDLE = ".clawgym-ca-bundle.pem"
_VARIABLES = (
    "SSL_CERT_FILE", "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "PIP_CERT", "NODE_EXTRA_CA_CERTS", "GIT_SSL_CAINFO",
    "CARGO_HTTP_CAINFO",
)  # fmt: skip
"""Where programs that fetch look for certificates. As build arguments they end with the build."""


@dataclass(frozen=True, slots=True)
class BuildInputs:
    """Inputs of every build of one engine."""

    ca_bundle: Path | None = None
    """Certificates in PEM form, where a proxy with an authority of its own stands before the registries."""
    proxies: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """`HTTP_PROXY`, `https_proxy` and so on, which every builder takes as arguments without being told of them."""

    def files(self, dockerfile: Path) -> dict[str, bytes]:
        """Return what a builder is to see instead of, or beside, the files of a folder.

        Raises:
            SandboxError: the certificates cannot be read.
        """
        if self.ca_bundle is None:
            return {}
        try:
            certificates = self.ca_bundle.read_bytes()
        except OSError as error:
            raise SandboxError(f"Expected certificates in {self.ca_bundle}, got: {error}") from error
        return {"Dockerfile": _with_authority(dockerfile.read_text()).encode(), _BUNDLE: certificates}


def _with_authority(dockerfile: str) -> str:
    """Add to every stage the certificates, and the variables that name them to what it runs."""
    added = [f"COPY {_BUNDLE} /{_BUNDLE}", *(f"ARG {name}=/{_BUNDLE}" for name in _VARIABLES)]
    lines: list[str] = []
    continued = False
    for line in dockerfile.splitlines():
        lines.append(line)
        if not continued and line.upper().split(maxsplit=1)[:1] == ["FROM"]:
            lines += added
        continued = line.rstrip().endswith("\\")
    return "\n".join((*lines, ""))
