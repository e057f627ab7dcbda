"""The beginnings of texts that were encoded: a text in, the longest known beginning of it and its ids out.

Makes the next turn of a long conversation independent of its length but for comparing and copying. Not
locked: its owner is.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from dataclasses import dataclass

from tokenization.segment_memory import TokenIds

# Conversations that begin alike for so many characters share a shelf; a longer text stands on a later one.
_SHELF_CHARS = (16 << 10, 2 << 10)
_SHELF_PREFIXES_MAX = 4
_PREFIX_BYTES = 500


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """A beginning whose ids are the same in every text that begins so.

    Attributes:
        text: What a text has to begin with; longer than what is encoded, by what proves its end.
        end: How many characters of it `ids` stand for.
        ids: Their token ids.
    """

    text: str
    end: int
    ids: TokenIds

    @property
    def size_bytes(self) -> int:
        """Memory in use."""
        return sys.getsizeof(self.text) + self.ids.nbytes + _PREFIX_BYTES


class PrefixMemory:
    """Remembers beginnings; the least recently used shelf goes first.

    Args:
        capacity_bytes: Most memory in use.

    Attributes:
        used_bytes: Memory in use.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.used_bytes = 0
        self._capacity_bytes = capacity_bytes
        self._shelves: OrderedDict[str, list[Prefix]] = OrderedDict()

    def get(self, text: str) -> Prefix | None:
        """The longest known beginning of `text`."""
        for chars in _SHELF_CHARS:
            shelf = self._shelves.get(key := text[:chars]) if len(text) > chars else None
            found = [prefix for prefix in shelf or () if text.startswith(prefix.text)]
            if found:
                self._shelves.move_to_end(key)
                return max(found, key=_end)
        return None

    def put(self, prefix: Prefix) -> None:
        """Remembers a beginning, unless it is short."""
        chars = next((chars for chars in _SHELF_CHARS if prefix.end > chars), None)
        if chars is None or prefix.size_bytes > self._capacity_bytes:
            return
        key = prefix.text[:chars]
        shelf = self._shelves.get(key)
        if shelf is None:
            shelf = self._shelves[key] = []
            self.used_bytes += sys.getsizeof(key)
        elif any(known.text == prefix.text for known in shelf):
            return
        shelf.append(prefix)
        self.used_bytes += prefix.size_bytes
        if len(shelf) > _SHELF_PREFIXES_MAX:
            self.used_bytes -= shelf.pop(0).size_bytes
        while self.used_bytes > self._capacity_bytes:
            key, oldest = self._shelves.popitem(last=False)
            self.used_bytes -= sys.getsizeof(key) + sum(prefix.size_bytes for prefix in oldest)


def _end(prefix: Prefix) -> int:
    return prefix.end
