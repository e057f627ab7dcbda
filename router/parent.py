"""Ends this process when the one that started it ends. Linux only: the kernel sends the signal."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def exit_with_parent() -> None:
    """Asks for SIGTERM at the parent's end, however it comes; its *thread* that started us counts."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before we had asked
        os.kill(os.getpid(), signal.SIGTERM)
