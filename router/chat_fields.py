"""A chat request's fields: its body in, decoded fields out, its messages as JSON text whose form is checked.

Whoever goes on with a long conversation sends the very bytes of the last request's messages again. What was
once read as the beginning of a list of messages is known by its digest, and a mark is read in its place: what
is around it is JSON if and only if the whole is. Knows no API beyond that; raises what the decoder does.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from tokenization.message_ends import (
    NEW_MESSAGES_MAX,
    MessagesEnd,
    guessed_end,
    last_message_end,
    message_ends,
    messages_digest,
    shared_end,
)

_RAW_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
# Shorter ones are read as fast as they are looked up.
_LONG_BYTES = 16 << 10
_NAME = b'"messages"'
_SPACE = b" \t\r\n"
# Most bytes between the name and the list.
_SPACE_MAX = 64
_KNOWN_MAX = 40_000
# New messages of most requests: an answer and a question, or a question alone.
_TURN_MESSAGES = 2


class ReadChat(NamedTuple):
    """A body that was read.

    Attributes:
        fields: Its fields; `messages` as msgspec.Raw, which is a view of it.
        ends: Of these messages, the longest first; none where they were not looked for.
    """

    fields: dict[str, Any]
    ends: Sequence[MessagesEnd] = ()


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
        # Unknown to clients: no body holds it.
        self._mark = b'["%b"' % secrets.token_hex(16).encode()

    def read(self, body: bytes | bytearray) -> ReadChat:
        """Reads a body.

        Raises:
            msgspec.DecodeError, RecursionError: It is no JSON object.
        """
        chat = self._long(body) if len(body) >= self._long_bytes else None
        if chat is None:
            chat = ReadChat(_RAW_FIELDS.decode(body))
        fields = chat.fields
        for name, value in fields.items():
            if name != "messages":
                fields[name] = msgspec.json.decode(value)
        return chat

    def _long(self, body: bytes | bytearray) -> ReadChat | None:
        """Reads what is behind the longest known beginning of the messages; None: all has to be read."""
        name = body.find(_NAME)
        colon = name + len(_NAME)
        start = body.find(b"[", colon, colon + _SPACE_MAX)
        if name < 0 or start < 0 or body[colon:start].strip(_SPACE) != b":":
            return None
        guess = guessed_end(body, start)
        ends = message_ends(body, start, guess, _TURN_MESSAGES)
        known = self._known(ends)
        if known is None:
            ends = message_ends(body, start, guess, NEW_MESSAGES_MAX)
            known = self._known(ends)
        if known is not None:
            return self._behind(body, start, known, ends)
        fields = _RAW_FIELDS.decode(body)
        messages = memoryview(fields.get("messages", b""))
        end = last_message_end(messages)
        if end is not None and messages[0] == ord("["):
            self._remember(messages_digest(messages[:end]))
            if shared := shared_end(messages[:end]):
                self._remember(shared.digest)
        return ReadChat(fields)

    def _behind(
        self, body: bytes | bytearray, start: int, known: MessagesEnd, ends: Sequence[MessagesEnd]
    ) -> ReadChat | None:
        """Reads a body with the mark in the place of known messages; None where they are not the body's."""
        view, mark = memoryview(body), self._mark
        rest = start + known.size_bytes
        try:
            fields: dict[str, Any] = _RAW_FIELDS.decode(b"".join((view[:start], mark, view[rest:])))
        except (ValueError, RecursionError):
            return None  # what is wrong is said of the whole
        messages = memoryview(fields.get("messages", b""))
        if messages[: len(mark)] != mark:
            return None
        whole = view[start : rest + len(messages) - len(mark)]
        fields["messages"] = msgspec.Raw(whole)
        end = last_message_end(whole)
        if end is None:
            return ReadChat(fields)
        if end != ends[0].size_bytes:
            ends = message_ends(body, start, start + end, _TURN_MESSAGES)
        if end > known.size_bytes:
            self._remember(ends[0].digest)
        return ReadChat(fields, ends)

    def _known(self, ends: Sequence[MessagesEnd]) -> MessagesEnd | None:
        """The first of the ends that was read before."""
        for end in ends:
            if end.digest in self._young:
                return end
            if end.digest in self._old:
                self._remember(end.digest)
                return end
        return None

    def _remember(self, digest: bytes) -> None:
        if len(self._young) >= self._half:
            self._old, self._young = self._young, set()
        self._young.add(digest)
