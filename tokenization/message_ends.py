"""Where the messages of a list end: its JSON text in, places and digests of all up to there out.

Whoever goes on with a conversation sends the very bytes of the last request again, and new messages behind
them. So what became of a list is found again by the digest of its text, in lists that go on alike. Places are
guesses, which only a digest that is known confirms. Knows nothing of what messages say.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from xxhash import xxh3_128

# How a message begins in nearly every client's JSON; another spelling is found only where nothing is new.
_MESSAGE = b'{"role"'
# Unknown to clients: none is made to have another's digest.
_SEED = secrets.randbits(64)
_SPACE = b" \t\r\n"
_MESSAGES = msgspec.json.Decoder(list[msgspec.Raw])
# Of a list of messages, behind the last one's end and with it.
_END_BYTES_MAX = 64

# What is shorter is as soon shown anew.
_SHARED_LEAST_BYTES = 2 << 10

NEW_MESSAGES_MAX = 8
"""New messages to look behind where there are more than an answer and a question: calls of tools, say."""


class MessagesEnd(NamedTuple):
    """An end of messages.

    Attributes:
        size_bytes: From the list's opening bracket to there.
        digest: Of these bytes; of this process only.
    """

    size_bytes: int
    digest: bytes


def turn_ends(text: bytes | bytearray, start: int, end: int) -> Sequence[MessagesEnd]:
    """The ends of all messages and of all but the last two, an answer and a question: most often known.

    Args:
        text: As for `message_ends`, as `start` and `end`.
    """
    if end <= start:
        return ()
    question = text.rfind(_MESSAGE, start, end)
    answer = text.rfind(_MESSAGE, start, question) if question >= 0 else -1
    known = text.rfind(b"}", start, answer) + 1 if answer >= 0 else 0
    view = memoryview(text)
    if not known:
        return (MessagesEnd(end - start, messages_digest(view[start:end])),)
    hasher = xxh3_128(view[start:known], _SEED)
    before = MessagesEnd(known - start, hasher.digest())
    hasher.update(view[known:end])
    return MessagesEnd(end - start, hasher.digest()), before


def message_ends(text: bytes | bytearray, start: int, end: int, new_messages: int) -> Sequence[MessagesEnd]:
    """The ends of all messages and of all but the last ones, the longest first.

    Args:
        text: Holds the list.
        start: Of the list's opening bracket.
        end: Of its last message.
        new_messages: How many messages to look behind.
    """
    places: list[int] = []
    while end > start and len(places) <= new_messages:
        places.append(end)
        message = text.rfind(_MESSAGE, start, end)
        end = text.rfind(b"}", start, message) + 1 if message >= 0 else 0
    hasher, view, at = xxh3_128(seed=_SEED), memoryview(text), start
    ends: list[MessagesEnd] = []
    for place in reversed(places):
        hasher.update(view[at:place])
        ends.append(MessagesEnd(place - start, hasher.digest()))
        at = place
    ends.reverse()
    return ends


def shared_end(messages: memoryview) -> MessagesEnd | None:
    """The end of all messages but the last, with which other lists may begin, too; None where they are short.

    Args:
        messages: A list that can be decoded, from its opening bracket to the last message's end.
    """
    ends = message_ends(bytes(messages), 0, len(messages), 1)[1:]
    if not ends or ends[0].size_bytes < _SHARED_LEAST_BYTES:
        return None
    try:
        last = _MESSAGES.decode(messages_behind(messages, ends[0].size_bytes) or b"")
    except (msgspec.DecodeError, RecursionError):
        return None  # within a message
    return ends[0] if len(last) == 1 else None


def messages_behind(messages: memoryview, end: int) -> bytes | None:
    """The list of those behind an end, as JSON text; None where no message ends there."""
    rest = bytes(messages[end:]).lstrip(_SPACE)
    return b"[%b]" % rest[1:] if rest[:1] in (b",", b"") else None


def guessed_end(text: bytes | bytearray, start: int) -> int:
    """Where the last message of a list seems to end that is not decoded yet; 0: nowhere."""
    last = text.rfind(_MESSAGE, start)
    return text.find(b"}]", last) + 1 if last >= 0 else 0


def messages_digest(messages: memoryview) -> bytes:
    """As a MessagesEnd has it, of messages from the opening bracket to the last one's end."""
    return xxh3_128(messages, _SEED).digest()


def last_message_end(messages: memoryview) -> int | None:
    """Where the last one of a list of messages ends; None where that cannot be seen at once."""
    tail = bytes(messages[-_END_BYTES_MAX:])
    if tail.endswith(b"}]"):
        return len(messages) - 1
    end = tail.rfind(b"}") + 1
    if not end or tail[end:].strip(_SPACE) != b"]":
        return None
    return len(messages) - len(tail) + end
