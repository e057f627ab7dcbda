"""Process-wide settings: log format, malloc, garbage collection, stop signals."""

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
from typing import Literal

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

    v: int = _flag("-v --v", count, 0, "1 and above: debug logs", metavar="LEVEL")
    zap_log_level: int | None = _flag(
        "--zap-log-level",
        log_level,
        None,
        "error, info, debug, or a number as for -v (default: info)",
        metavar="LEVEL",
    )
    zap_encoder: str = _flag(
        "--zap-encoder",
        Literal["console", "json"],
        "console",
        "json: each log line is a JSON object",
    )
    print_config: bool = switch(
        "process", "--print-config", False, "print the effective configuration and exit"
    )


def set_up_logs(flags: argparse.Namespace) -> None:
    """Set level and format of all logs; the more verbose of -v and --zap-log-level wins."""
    level = logging.INFO if flags.zap_log_level is None else flags.zap_log_level
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if flags.zap_encoder == "json" else logging.Formatter(_CONSOLE))
    logging.basicConfig(level=logging.DEBUG if flags.v > 0 else level, handlers=[handler])


class JsonFormatter(logging.Formatter):
    """Formatter that writes one JSON object per line with zap's field names."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "level": record.levelname.lower(),
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "logger": record.name,
            "msg": record.getMessage(),
        }
        if record.exc_info:
            fields["stacktrace"] = self.formatException(record.exc_info)
        return msgspec.json.encode(fields).decode()


def use_single_arena() -> None:
    """Limit malloc to one arena for all threads; call it before starting threads. No-op without glibc.

    glibc gives each thread an arena, which grows by single pages with a system call each: about one per
    request. Threads that share the GIL do not allocate in parallel, so they gain nothing from it.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    mallopt(_ARENA_MAX, 1)
    mallopt(_TOP_PAD, _STEP_BYTES)
    mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)


def trim_heap() -> None:
    """Return free heap memory above 64 MiB to the system. No-op without glibc.

    After a burst of connections or events the heap has large holes, which glibc does not return by itself.
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
    """C struct `mallinfo2` of malloc.h."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def tune_gc() -> None:
    """Make the garbage collector run less often, and exclude all objects alive now from it."""
    # Requests create no reference cycles, so only errors leave anything to collect.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)


class StopSignals:
    """Waiter for SIGTERM or SIGINT, whichever thread receives it; create it in the main thread.

    Installs handlers at creation. Blocking the signals for sigwait would not suffice: libraries start threads
    at import, and a signal to a thread that does not block it ends the process.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in _STOP_SIGNALS:
            signal.signal(number, lambda _number, _frame: None)

    def wait(self) -> None:
        """Wait for the first signal since creation; return at once if it has arrived already."""
        self._reader.recv(1)
