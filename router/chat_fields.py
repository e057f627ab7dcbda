"""A chat request's fields: its body in, decoded fields out, its messages as JSON text whose form is checked.

Whoever goes on with a long conversation sends the very bytes of the last request's messages again. What was
once read as the beginning of a list of messages is known by its digest, and a mark is read in its place: what
is around it is JSON if and only if the whole is. Knows no API beyond that; raises what the decoder does.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from xxhash import xxh3_128

from tokenization.conversations import last_message_end

_RAW_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
# Shorter ones are read as fast as they are looked up.
_LONG_BYTES = 128 << 10
_LIST = re.compile(rb'"messages"[ \t\r\n]*:[ \t\r\n]*\[')
# How a message begins in nearly every client's JSON.
_MESSAGE = b'{"role"'
# New messages that are looked behind: two turns, or a tool's call and result between.
_NEW_MESSAGES = 4
_KNOWN_MAX = 40_000


class _Beginning(NamedTuple):
    """Where messages may end, and the digest of all up to there."""

    end: int
    hasher: Any


class ChatFields:
    """Reads bodies; safe to share between threads.

    Args:
        known_max: Most digests remembered.
        long_bytes: Shorter bodies are read at once.
    """

    def __init__(self, known_max: int = _KNOWN_MAX, long_bytes: int = _LONG_BYTES) -> None:
        self._half = known_max // 2
        self._long_bytes = long_bytes
        self._young: set[bytes] = set()
        self._old: set[bytes] = set()
        # Unknown to clients: no body holds the one, none is made to have another's digest.
        self._mark = b'"%b"' % secrets.token_hex(16).encode()
        self._seed = secrets.randbits(64)

    def read(self, body: bytes | bytearray) -> dict[str, Any]:
        """The fields of a body; `messages` as msgspec.Raw, which is a view of it.

        Raises:
            msgspec.DecodeError, RecursionError: It is no JSON object.
        """
        fields = self._long(body) if len(body) >= self._long_bytes else None
        if fields is None:
            fields = _RAW_FIELDS.decode(body)
        for name, value in fields.items():
            if name != "messages":
                fields[name] = msgspec.json.decode(value)
        return fields

    def _long(self, body: bytes | bytearray) -> dict[str, Any] | None:
        """Reads what is behind the longest known beginning of the messages; None: all has to be read."""
        found = _LIST.search(body)
        if found is None:
            return None
        start, view = found.end() - 1, memoryview(body)
        for beginning in self._beginnings(body, start):
            if self._knows(beginning.hasher.digest()):
                fields = self._behind(view, start, beginning)
                if fields is not None:
                    return fields
        fields = _RAW_FIELDS.decode(body)
        messages = memoryview(fields.get("messages", b""))
        end = last_message_end(messages)
        if end is not None and messages[0] == ord("["):
            self._remember(xxh3_128(messages[:end], self._seed).digest())
        return fields

    def _beginnings(self, body: bytes | bytearray, start: int) -> Sequence[_Beginning]:
        """Where messages may end, the longest first."""
        view, hasher, beginnings = memoryview(body), xxh3_128(seed=self._seed), []
        at = start
        for end in reversed(_ends(body, start)):
            hasher.update(view[at:end])
            beginnings.append(_Beginning(end, hasher.copy()))
            at = end
        return beginnings[::-1]

    def _behind(self, view: memoryview, start: int, known: _Beginning) -> dict[str, Any] | None:
        """Reads a body with the mark in the place of known messages; None where they are not the body's."""
        opened = b"[" + self._mark
        try:
            fields: dict[str, Any] = _RAW_FIELDS.decode(b"".join((view[:start], opened, view[known.end :])))
        except (ValueError, RecursionError):
            return None  # what is wrong is said of the whole
        messages = memoryview(fields.get("messages", b""))
        if messages[: len(opened)] != opened:
            return None
        whole = view[start : known.end + len(messages) - len(opened)]
        fields["messages"] = msgspec.Raw(whole)
        end = last_message_end(whole)
        if end is not None and start + end > known.end:
            known.hasher.update(whole[known.end - start : end])
            self._remember(known.hasher.digest())
        return fields

    def _knows(self, digest: bytes) -> bool:
        if digest in self._young:
            return True
        if digest in self._old:
            self._remember(digest)
            return True
        return False

    def _remember(self, digest: bytes) -> None:
        if len(self._young) >= self._half:
            self._old, self._young = self._young, set()
        self._young.add(digest)


def _ends(body: bytes | bytearray, start: int) -> Sequence[int]:
    """Where messages seem to end, the last first: of all, and of all but so many."""
    last = body.rfind(_MESSAGE, start)
    if last < 0:
        return ()
    closed = body.find(b"}]", last) + 1
    ends = [closed] if closed else []
    while last >= 0 and len(ends) <= _NEW_MESSAGES and (end := body.rfind(b"}", start, last) + 1):
        ends.append(end)
        last = body.rfind(_MESSAGE, start, end)
    return ends
