"""How the process logs: its flags in, Python's root logger set up."""

from __future__ import annotations

import argparse
import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

import msgspec

from indexer.flags import flag
from router.flags import count, log_level, switch

_CONSOLE = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_flag = partial(flag, "process")


@dataclass(frozen=True, slots=True)
class LogFlags:
    """What the process tells, and how."""

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
