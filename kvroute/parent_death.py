"""Ties a program's life to its parent's: `python parent_death.py PARENT_PID PROGRAM [ARGUMENT ...]`.

Asks the kernel for SIGTERM when the parent ends, however it ends, and then becomes the program. A script of
its own, because between fork and exec of a process with threads no Python may run. Without Linux it only
becomes the program.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    parent_pid, program = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent_pid:  # it ended before we asked
            sys.exit(1)
    try:
        os.execvp(program[0], program)
    except OSError as error:
        sys.exit(f"{program[0]}: {error.strerror}")
