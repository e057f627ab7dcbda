"""How much there is to do for a list of messages, whatever its bytes: decoded JSON in, a number out.

Templates take some 20 us for a message, however short, so a body of 1 MB may take them a second.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

ITEMS_AT_ONCE_MAX = 500
"""Messages and their parts that are read and rendered in some milliseconds."""

_LISTS = ("content", "tool_calls")


class ManyItemsError(Exception):
    """Messages have more parts than are to be rendered at once; it is no fault of theirs."""


def items_of(messages: object) -> int:
    """Messages, their parts and their calls; also of what is not checked yet."""
    if not isinstance(messages, list):
        return 0
    return len(messages) + sum(map(_inner_items, messages))


def _inner_items(message: Any) -> int:
    if type(message) is not dict:
        return 0
    lists = [value for name in _LISTS if isinstance(value := message.get(name), list)]
    # Another API's results have parts of their own.
    inner = [part.get("content") for part in chain.from_iterable(lists) if type(part) is dict]
    return sum(map(len, lists)) + sum([len(parts) for parts in inner if type(parts) is list])
