"""The process itself: how it logs, keeps its memory, listens, and is told to stop. Knows no requests."""

from __future__ import annotations

import argparse
import ctypes
import gc
import logging
import signal
import socket
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

import msgspec

from common.flags import flag
from router.config.flags import count, log_level, switch

_CONSOLE = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# malloc.h of glibc.
_TRIM_THRESHOLD, _TOP_PAD, _ARENA_MAX = -1, -2, -8
_STEP_BYTES = 32 << 20
_KEPT_BYTES = 256 << 20
_FREE_BYTES_MAX = 64 << 20
_COLLECT_AFTER = (20_000, 20, 20)
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_flag = partial(flag, "process")


@dataclass(frozen=True, slots=True)
class LogFlags:
    """Flags of logging."""

    v: int = _flag("-v --v", count, 0, "1 and above: every detail", metavar="LEVEL")
    zap_log_level: int | None = _flag(
        "--zap-log-level",
        log_level,
        None,
        "error, info, debug, or a number as for -v (default: info)",
        metavar="LEVEL",
    )
    zap_encoder: str = _flag(
        "--zap-encoder",
        str,
        "console",
        "json: a log line is a JSON object (default: %(default)s)",
        choices=("console", "json"),
        metavar=None,
    )
    print_config: bool = switch(
        "process", "--print-config", False, "print what these flags and files come to, and end"
    )


def set_up_logs(flags: argparse.Namespace) -> None:
    """Sets level and form of all logs; -v and --zap-log-level may each ask for more."""
    level = logging.INFO if flags.zap_log_level is None else flags.zap_log_level
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if flags.zap_encoder == "json" else logging.Formatter(_CONSOLE))
    logging.basicConfig(level=logging.DEBUG if flags.v > 0 else level, handlers=[handler])


class JsonFormatter(logging.Formatter):
    """One JSON object a line, with the names that zap gives its fields."""

    def format(self, record: logging.LogRecord) -> str:
        told = {
            "level": record.levelname.lower(),
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "logger": record.name,
            "msg": record.getMessage(),
        }
        if record.exc_info:
            told["stacktrace"] = self.formatException(record.exc_info)
        return msgspec.json.encode(told).decode()


def use_one_heap() -> None:
    """Has all threads share one heap; call it before there are any.

    glibc gives each thread a heap of its own, which grows by single pages with a system call each: about one
    for each request. Threads that hold the GIL in turns gain nothing from that. With another C library
    nothing happens.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    mallopt(_ARENA_MAX, 1)
    mallopt(_TOP_PAD, _STEP_BYTES)
    mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)


def give_back() -> None:
    """Return free memory to the system where there is more of it than requests need.

    After a flood of connections or events the heap has large holes, which glibc keeps. With another C library
    nothing happens.
    """
    try:
        libc = ctypes.CDLL(None)
        mallinfo2, malloc_trim = libc.mallinfo2, libc.malloc_trim
    except (AttributeError, OSError):
        return
    mallinfo2.restype = _MallInfo2
    if mallinfo2().fordblks > _FREE_BYTES_MAX:
        malloc_trim(ctypes.c_size_t(_STEP_BYTES))


class _MallInfo2(ctypes.Structure):
    """`struct mallinfo2` of malloc.h."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def calm_collector() -> None:
    """Lets Python's cycle collector look less often, and never at what lives as long as the process."""
    # Requests leave no cycles behind; what is looked for is only what went wrong.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)


class StopSignals:
    """SIGTERM and SIGINT as something to wait for, whichever thread the system hands them to.

    Catches them from its making on; to be made in the main thread. Blocking them for sigwait is not enough:
    libraries start threads while they are imported, and a signal that one of these does not block ends the
    process.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in _STOP_SIGNALS:
            signal.signal(number, lambda _number, _frame: None)

    def wait(self) -> None:
        """Waits for the first one; returns at once if it has come already."""
        self._reader.recv(1)
