"""What is known of conversations: the digest of messages' JSON text in, the ids of what they show out.

The least recently used go first when the bytes are used up. Knows no templates and reads no JSON.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, Protocol, TypeAlias, TypeVar

import msgspec

from tokenization.message_ends import NEW_MESSAGES_MAX, MessagesEnd, message_ends, turn_ends
from tokenization.segment_memory import TokenIds
from tokenization.turns import Later

_ENTRY_BYTES = 1200
_CHAR_BYTES_MAX = 4

_Key: TypeAlias = tuple[object, bytes]


class Shown(msgspec.Struct, frozen=True, eq=False):
    """How later messages of a conversation are shown, whatever they are.

    Attributes:
        later: What the template knows of it.
        closing: Ids of what stands behind the last message; None where a text may not be cut in front of it.
        proof: Enough of that to prove that what is in front ends there.
        size_bytes: Memory in use.
    """

    later: Later
    closing: TokenIds | None
    proof: str
    size_bytes: int


class Beginning(msgspec.Struct, frozen=True, eq=False):
    """Messages that a conversation begins with.

    Attributes:
        ids: Ids of what they show, as far as these are the same whatever follows.
        chars: How many characters these stand for.
        rest: What they show behind these.
        proof: What has to follow these characters, for their ids to be what they are.
        shown: How later messages are shown.
    """

    ids: TokenIds
    chars: int
    rest: str
    proof: str
    shown: Shown

    @property
    def size_bytes(self) -> int:
        """Memory in use, at most."""
        rest_bytes = _CHAR_BYTES_MAX * len(self.rest)
        return self.ids.nbytes + rest_bytes + self.shown.size_bytes + _ENTRY_BYTES


class Sized(Protocol):
    """What is known of a beginning."""

    @property
    def size_bytes(self) -> int:
        """Memory in use."""


_Known = TypeVar("_Known", bound=Sized)


class Beginnings(Generic[_Known]):
    """Beginnings of conversations with one model; safe to share between threads.

    Args:
        capacity_bytes: Most memory for what is remembered.

    Attributes:
        used_bytes: Memory in use.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.used_bytes = 0
        self._capacity_bytes = capacity_bytes
        self._beginnings: OrderedDict[_Key, _Known] = OrderedDict()
        self._lock = threading.Lock()

    def find(
        self, messages: memoryview, ends: Sequence[MessagesEnd], given: object
    ) -> tuple[_Known | None, int, bytes]:
        """The longest known beginning of a list of messages, its size in bytes, and the digest of all of it.

        Args:
            messages: From the opening bracket to the last one's end.
            ends: Those that are known already.
            given: What they are shown with; only what was shown with the same counts.
        """
        ends = ends or turn_ends(bytes(messages), 0, len(messages))
        found = self._longest(ends, given)
        if found is None and len(ends) <= NEW_MESSAGES_MAX:
            ends = message_ends(bytes(messages), 0, len(messages), NEW_MESSAGES_MAX)
            found = self._longest(ends, given)
        beginning, size_bytes = found or (None, 0)
        return beginning, size_bytes, ends[0].digest

    def put(self, beginning: _Known, digest: bytes, given: object) -> None:
        """Remembers a beginning by its digest."""
        key, size_bytes = (given, digest), beginning.size_bytes
        with self._lock:
            if key in self._beginnings or size_bytes > self._capacity_bytes:
                return
            self._beginnings[key] = beginning
            self.used_bytes += size_bytes
            while self.used_bytes > self._capacity_bytes:
                self.used_bytes -= self._beginnings.popitem(last=False)[1].size_bytes

    def _longest(self, ends: Sequence[MessagesEnd], given: object) -> tuple[_Known, int] | None:
        for size_bytes, digest in ends:
            key = given, digest
            beginning = self._beginnings.get(key)
            if beginning is not None:
                self._use(key)
                return beginning, size_bytes
        return None

    def _use(self, key: _Key) -> None:
        with self._lock:
            if key in self._beginnings:
                self._beginnings.move_to_end(key)
