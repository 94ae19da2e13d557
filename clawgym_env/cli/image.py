"""`clawgym image`: images for the Docker sandbox, where a harness is to be inside rather than shown from the cache."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import OmitArgPrefixes, Positional, arg

from clawgym_env import registry
from clawgym_env.cache import cache_dir
from clawgym_env.cli.setup import printed
from clawgym_env.errors import UsageError
from clawgym_env.sandbox.base import Image
from clawgym_env.sandbox.build_inputs import BuildInputs
from clawgym_env.sandbox.docker import DockerBackend

if TYPE_CHECKING:
    from clawgym_env.sandbox.images import ImageStore

BASE = "base"
_PROXIES = ("http_proxy", "https_proxy", "ftp_proxy", "no_proxy", "all_proxy")


@dataclass(frozen=True, kw_only=True)
class BuildArgs:
    """What a build starts from."""

    base: Annotated[str | None, arg(name="from")] = None
    """An image by name; "host" for this machine's /usr (a harness only, its default) or "debootstrap" for a Debian made
    here (the default of base): these two need no registry."""
    ca_bundle: Path | None = None
    """Certificates (PEM) for downloads in builds, where a proxy needs them. Proxies are taken from the environment."""


def image_command(
    action: Positional[Literal["build", "list"]], name: Positional[str] = "", *, args: OmitArgPrefixes[BuildArgs]
) -> None:
    """Make an image in the Docker engine, or list those made here: clawgym image build pi|…|base|FOLDER.

    Args:
        action: build or list.
        name: of what to build: a harness with its options, base (what harnesses can be put on), or a folder with a
            Dockerfile.
    """
    if action == "build" and not name:
        raise UsageError("Expected what to build, got nothing. For example: clawgym image build pi")
    proxies = {key: value for key, value in os.environ.items() if key.lower() in _PROXIES}
    backend = DockerBackend(inputs=BuildInputs(ca_bundle=args.ca_bundle, proxies=proxies))
    if action == "build":
        with printed("clawgym_env.sandbox", "harness_adapters"):
            print(_build(backend.images(), name, args.base))
        return
    for image in backend.images().made_here():
        print(f"{image.tag:<40} {image.size_bytes / 1e6:>6.0f} MB  {' '.join(sorted(image.holds))}")


def _build(store: ImageStore, name: str, base: str | None) -> str:
    from clawgym_env.sandbox import harness_images

    if name == BASE:
        return harness_images.build_base(store, base or harness_images.DEBOOTSTRAP)
    if (Path(name) / "Dockerfile").is_file():
        return store.resolve(Image(build=Path(name))).tag
    harness = registry.adapter(name)
    harness.install(cache_dir())
    return harness_images.build_harness(store, harness, cache=cache_dir(), base=base or harness_images.HOST)
