"""What holds for the whole suite."""

from __future__ import annotations

import signal

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Listen to Ctrl-C even where the suite was started in the background: shells make such jobs deaf to it, children
    inherit that, and the tests of clean ends would wait for ever."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
