"""Where installed harnesses and built policies are kept on this machine.

Asked at the face (environments, command line) and handed down as a `Path`; nothing below reads the environment.
"""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return `$CLAWGYM_CACHE`, else `clawgym` in the user's cache folder. Not created here."""
    if explicit := os.environ.get("CLAWGYM_CACHE"):
        return Path(explicit).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "clawgym"
