"""Memory that decoded JSON takes: a value in, bytes out. Knows nothing of what it says."""

from __future__ import annotations

import sys
from typing import Any


def decoded_bytes(value: Any) -> int:
    """Bytes of a value and all that it holds, at most: what occurs in it twice counts twice."""
    size_bytes = 0
    pending = [value]
    while pending:
        item = pending.pop()
        size_bytes += sys.getsizeof(item)
        if isinstance(item, dict):
            size_bytes += sum(map(sys.getsizeof, item))
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)
    return size_bytes
