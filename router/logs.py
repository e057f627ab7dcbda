"""How the process logs: flags in, Python's root logger set up."""

from __future__ import annotations

import argparse
import logging
from datetime import UTC, datetime

import msgspec

_CONSOLE = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def set_up_logs(flags: argparse.Namespace) -> None:
    """Sets level and form of all logs; -v and --zap-log-level may each ask for more."""
    level = logging.INFO if flags.zap_log_level is None else flags.zap_log_level
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if flags.zap_encoder == "json" else logging.Formatter(_CONSOLE))
    logging.basicConfig(level=logging.DEBUG if flags.v > 0 else level, handlers=[handler])


class JsonFormatter(logging.Formatter):
    """One JSON object a line, with the names that zap gives its fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        told = {
            "level": record.levelname.lower(),
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "logger": record.name,
            "msg": record.getMessage(),
        }
        if record.exc_info:
            told["stacktrace"] = self.formatException(record.exc_info)
        return msgspec.json.encode(told).decode()
