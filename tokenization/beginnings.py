"""What is known of conversations: the digest of messages' JSON text in, the ids of what they show out.

Bounded by bytes. Knows no templates and reads no JSON.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import msgspec

from tokenization.message_ends import NEW_MESSAGES_MAX, MessagesEnd, message_ends, turn_ends
from tokenization.segment_memory import TokenIds
from tokenization.turns import Later

NOWHERE = MessagesEnd(0, b"")
"""Where the known beginning of an unknown list ends."""

# The part of the memory that is for earlier messages of conversations.
_EARLIER_SHARE = 4
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


class Remembered(NamedTuple):
    """What a memory of conversations tells of itself.

    Attributes:
        used_bytes: Memory in use.
        known: Chats so far whose first messages were known.
        new: Those of which nothing was known.
        pushed_out: Conversations forgotten, with whatever they ended last, to make room.
    """

    used_bytes: int
    known: int
    new: int
    pushed_out: int


class Beginnings(Generic[_Known]):
    """Beginnings of conversations with one model; safe to share between threads.

    A quarter of the memory is for those that conversations have gone on from, or may have in common: they
    serve whoever begins alike, and push out none with which a conversation ended last.

    Args:
        capacity_bytes: Most memory for what is remembered.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._earlier: _Recent[_Known] = _Recent()
        self._last: _Recent[_Known] = _Recent()
        self._lock = threading.Lock()
        self._found = self._new = 0
        self.bound(capacity_bytes)

    @property
    def used_bytes(self) -> int:
        """Memory in use."""
        return self._earlier.used_bytes + self._last.used_bytes

    @property
    def remembered(self) -> Remembered:
        """What it tells of itself."""
        return Remembered(self.used_bytes, self._found, self._new, self._last.pushed_out)

    def bound(self, capacity_bytes: int) -> None:
        """Sets how much may be remembered."""
        with self._lock:
            earlier_bytes = capacity_bytes // _EARLIER_SHARE
            self._earlier.bound(earlier_bytes)
            self._last.bound(capacity_bytes - earlier_bytes)

    def find(
        self, messages: memoryview, ends: Sequence[MessagesEnd], given: object
    ) -> tuple[_Known | None, MessagesEnd, bytes]:
        """The longest known beginning of a list of messages, where it ends, and the digest of all of it.

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
        if found is not None:
            return *found, ends[0].digest
        with self._lock:
            self._new += 1
        return None, NOWHERE, ends[0].digest

    def put(self, beginning: _Known, digest: bytes, given: object, behind: MessagesEnd | None = None) -> None:
        """Remembers a beginning by its digest.

        Args:
            behind: The end of the one that was known, from which the conversation went on.
        """
        with self._lock:
            if behind is not None and (left := self._last.pop((given, behind.digest))) is not None:
                self._earlier.put((given, behind.digest), left)
            self._last.put((given, digest), beginning)

    def share(self, beginning: _Known, digest: bytes, given: object) -> None:
        """Remembers a beginning that no conversation ended with, as others may have it, too."""
        with self._lock:
            self._earlier.put((given, digest), beginning)

    def _longest(self, ends: Sequence[MessagesEnd], given: object) -> tuple[_Known, MessagesEnd] | None:
        for end in ends:
            key = given, end.digest
            for recent in (self._last, self._earlier):
                if (beginning := recent.get(key)) is not None:
                    with self._lock:
                        self._found += 1
                        recent.use(key)
                    return beginning, end
        return None


class _Recent(Generic[_Known]):
    """Beginnings, the least recently used of which go first. All but `get` needs a lock.

    Attributes:
        used_bytes: Memory in use.
        pushed_out: How many have gone for others so far.
        get: A beginning by its key, or None.
    """

    def __init__(self) -> None:
        self.used_bytes = 0
        self.pushed_out = 0
        self._capacity_bytes = 0
        self._beginnings: OrderedDict[_Key, _Known] = OrderedDict()
        self.get = self._beginnings.get

    def bound(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        while self.used_bytes > capacity_bytes:
            self.used_bytes -= self._beginnings.popitem(last=False)[1].size_bytes
            self.pushed_out += 1

    def use(self, key: _Key) -> None:
        if key in self._beginnings:
            self._beginnings.move_to_end(key)

    def put(self, key: _Key, beginning: _Known) -> None:
        size_bytes = beginning.size_bytes
        if key in self._beginnings or size_bytes > self._capacity_bytes:
            return
        self._beginnings[key] = beginning
        self.used_bytes += size_bytes
        self.bound(self._capacity_bytes)

    def pop(self, key: _Key) -> _Known | None:
        beginning = self._beginnings.pop(key, None)
        if beginning is not None:
            self.used_bytes -= beginning.size_bytes
        return beginning
