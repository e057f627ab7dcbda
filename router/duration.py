"""Durations as the reference's flags write them ("50ms", "1m30s", or plain seconds): text in, seconds out."""

from __future__ import annotations

import re

_UNITS_S = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(h|ms|m|us|ns|s)")
_WHOLE = re.compile(rf"(?:{_PART.pattern})+")


def seconds(text: str) -> float:
    """Reads a duration.

    Raises:
        ValueError: It is none, or negative.
    """
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text):
        return float(text)
    if not _WHOLE.fullmatch(text):
        raise ValueError(f"not a duration: {text!r}; write 500ms, 1s or 1m30s")
    return sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(text))
