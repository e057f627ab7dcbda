"""Checked chat messages by their JSON text: a conversation's next turn sends most of them again.

To check and decode a message costs more than to look it up, above all one with calls of tools.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from tokenization.chat_messages import ManyItemsError, chat_message, items_of
from tokenization.errors import PromptError

_CAPACITY_BYTES = 32 << 20
_RAW_MESSAGES = msgspec.json.Decoder(list[msgspec.Raw])
_ENTRY_BYTES = 300


class _Checked(NamedTuple):
    message: dict[str, Any]
    items: int


class MessageMemory:
    """Remembers messages of chats with one template; safe to share between threads.

    Args:
        wants_parts: As for `chat_messages`.
        capacity_bytes: Most memory in use. Messages that were not asked for while half of it was filled anew
            are forgotten.

    Attributes:
        used_bytes: Memory in use.
    """

    def __init__(self, *, wants_parts: bool, capacity_bytes: int = _CAPACITY_BYTES) -> None:
        self._wants_parts = wants_parts
        self._half_bytes = capacity_bytes // 2
        self._young: dict[bytes, _Checked] = {}
        self._old: dict[bytes, _Checked] = {}
        self._young_bytes = self._old_bytes = 0
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """Memory in use."""
        return self._young_bytes + self._old_bytes

    def checked(self, text: msgspec.Raw, items_max: int | None = None) -> list[Mapping[str, Any]]:
        """Check messages that are JSON text; they are shared, do not write to them.

        Args:
            text: The list of messages.
            items_max: Of more messages and parts nothing is made; None: any number is checked.

        Raises:
            PromptError: As `chat_messages`.
            ManyItemsError: There are more than `items_max`.
        """
        messages: list[Mapping[str, Any]] = []
        items_left = math.inf if items_max is None else items_max
        try:
            raws = _RAW_MESSAGES.decode(text)
            for at, raw in enumerate(raws):
                key = bytes(raw)
                known = self._young.get(key)
                if known is None:
                    known = self._old.get(key) or self._check(raw, at, items_left)
                    self._put(key, known)
                items_left -= known.items
                if items_left < 0:
                    raise ManyItemsError
                messages.append(known.message)
        except (ValueError, RecursionError):
            messages = []  # it is no JSON, or no list
        if not messages:
            raise PromptError("messages must be a non-empty list", "messages")
        return messages

    def _check(self, raw: msgspec.Raw, at: int, items_left: float) -> _Checked:
        message = msgspec.json.decode(raw)
        items = items_of([message])
        if items > items_left:
            raise ManyItemsError
        return _Checked(chat_message(message, at, wants_parts=self._wants_parts), items)

    def _put(self, key: bytes, checked: _Checked) -> None:
        size_bytes = _ENTRY_BYTES + sys.getsizeof(key) + _decoded_bytes(checked.message)
        if size_bytes > self._half_bytes or key in self._young:
            return
        with self._lock:
            if self._young_bytes + size_bytes > self._half_bytes:
                self._old, self._old_bytes = self._young, self._young_bytes
                self._young, self._young_bytes = {}, 0
            self._young[key] = checked
            self._young_bytes += size_bytes


def _decoded_bytes(value: Any) -> int:
    """Memory of decoded JSON, at most: what occurs in it twice counts twice."""
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
