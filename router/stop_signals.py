"""SIGTERM and SIGINT as something to wait for, whichever thread the system hands them to.

Blocking them for sigwait is not enough: libraries start threads while they are imported, and a signal that
one of these does not block ends the process.
"""

from __future__ import annotations

import signal
import socket

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Catches stop signals from its making on; to be made in the main thread."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in _STOP_SIGNALS:
            signal.signal(number, lambda _number, _frame: None)

    def wait(self) -> None:
        """Waits for the first one; returns at once if it has come already."""
        self._reader.recv(1)
