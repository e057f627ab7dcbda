"""Script that runs a program which ends with its parent.

Usage: `python parent_death.py PARENT_PID PROGRAM [ARGUMENT ...]`. On Linux the kernel sends SIGTERM when the
parent ends for any reason (PR_SET_PDEATHSIG); elsewhere the script only runs the program. It is a script
because a process with threads must not run Python code between fork and exec.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    parent_pid, program = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent_pid:  # the parent ended before prctl
            sys.exit(1)
    try:
        os.execvp(program[0], program)
    except OSError as error:
        sys.exit(f"{program[0]}: {error.strerror}")
