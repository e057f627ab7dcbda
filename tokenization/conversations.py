"""Conversations that go on: a request's messages as JSON text in, the ids of what is known of them out.

Whoever goes on with a conversation sends the very bytes of the last request again, and new messages behind
them. So what was decoded, rendered and encoded before is found by its bytes, and costs a comparison. For
templates that show each message on its own, see `turn_form`; what is not surely the same is left to others.
"""

from __future__ import annotations

import secrets
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
from xxhash import xxh3_128

from tokenization.chat_messages import chat_messages
from tokenization.chat_template import ChatTemplate
from tokenization.errors import PromptError
from tokenization.segment_memory import TokenIds
from tokenization.segments import Encoding, SegmentEncoder
from tokenization.turn_form import FIRST
from tokenization.turns import Later, options_key

# How a message begins in nearly every client's JSON; another spelling is found only where nothing is new.
_MESSAGE = b'{"role"'
# New messages that are looked behind: an answer and a question, and if that fails, calls of tools and theirs.
_NEW_MESSAGES = (2, 8)
_SPACE = b" \t\r\n"
# Of a list of messages, behind the last one's end and with it.
_END_BYTES_MAX = 64
_ENTRY_BYTES = 1200

_Key: TypeAlias = tuple[object, bytes]


@dataclass(frozen=True, slots=True, eq=False)
class Beginning:
    """Messages that a conversation begins with.

    Attributes:
        raw: Their JSON, from the list's opening bracket to the end of the last one.
        ids: Ids of what they show, as far as these are the same whatever follows.
        chars: How many characters these stand for.
        rest: What they show behind these.
        proof: What has to follow these characters, for their ids to be what they are.
        shown: How later messages are shown.
    """

    raw: bytes
    ids: TokenIds
    chars: int
    rest: str
    proof: str
    shown: Later

    @property
    def size_bytes(self) -> int:
        """Memory in use."""
        texts = self.raw, self.rest, self.shown.variables[FIRST]["content"]
        return sum(map(sys.getsizeof, texts)) + self.ids.nbytes + _ENTRY_BYTES


class Conversations:
    """Beginnings of conversations with one model; safe to share between threads.

    Args:
        capacity_bytes: Most memory for what is remembered; the least recently used goes first.

    Attributes:
        used_bytes: Memory in use.
    """

    def __init__(self, template: ChatTemplate, segments: SegmentEncoder, capacity_bytes: int) -> None:
        self.used_bytes = 0
        self.template = template
        self.segments = segments
        self._capacity_bytes = capacity_bytes
        # Unknown to clients, who could else have their conversations take each other's places.
        self._seed = secrets.randbits(64)
        self._beginnings: OrderedDict[_Key, Beginning] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, messages: msgspec.Raw, options: Mapping[str, Any]) -> Conversation | None:
        """A request's conversation; None where its messages may be shown otherwise than one by one.

        Args:
            options: As for `ChatTemplate.render`.
        """
        if not self.template.has_turns or options["tools"] is not None or options["documents"] is not None:
            return None
        if options["continue_final_message"]:
            return None
        kwargs, generates = options["template_kwargs"], options["add_generation_prompt"]
        given, view = options_key(kwargs), memoryview(messages)
        end = last_message_end(view)
        if given is None or end is None:
            return None
        return Conversation(self, bytes(view[:end]), (generates, given), options)

    def find(self, raw: bytes, given: object) -> tuple[Beginning | None, bytes]:
        """The longest known beginning of a list of messages, and the digest of all of it."""
        digests: Sequence[bytes] = ()
        for new_messages in _NEW_MESSAGES:
            digests = self._digests(raw, _ends(raw, new_messages))
            for digest in digests:
                beginning = self._beginnings.get((given, digest))
                if beginning is not None and raw.startswith(beginning.raw):
                    self._use((given, digest))
                    return beginning, digests[0]
        return None, digests[0]

    def put(self, beginning: Beginning, digest: bytes, given: object) -> None:
        """Remembers a beginning by its digest."""
        key, size_bytes = (given, digest), beginning.size_bytes
        with self._lock:
            if key in self._beginnings or size_bytes > self._capacity_bytes:
                return
            self._beginnings[key] = beginning
            self.used_bytes += size_bytes
            while self.used_bytes > self._capacity_bytes:
                self.used_bytes -= self._beginnings.popitem(last=False)[1].size_bytes

    def _use(self, key: _Key) -> None:
        with self._lock:
            if key in self._beginnings:
                self._beginnings.move_to_end(key)

    def _digests(self, raw: bytes, ends: Sequence[int]) -> Sequence[bytes]:
        """The digest of all up to each of these ends, which come last first."""
        hasher, start, found, view = xxh3_128(seed=self._seed), 0, [], memoryview(raw)
        for end in reversed(ends):
            hasher.update(view[start:end])
            found.append(hasher.digest())
            start = end
        return found[::-1]


class Conversation:
    """One request's messages.

    Attributes:
        chars: How many characters they show; known behind `begin`.
    """

    __slots__ = ("_conversations", "_digest", "_given", "_known", "_options", "_raw", "chars")

    def __init__(
        self, conversations: Conversations, raw: bytes, given: object, options: Mapping[str, Any]
    ) -> None:
        self.chars = 0
        self._conversations = conversations
        self._raw = raw
        self._given = given
        self._options = options
        self._known: Beginning | None = None
        self._digest = b""

    def begin(self, *, add_special_tokens: bool) -> Encoding | None:
        """Begins to encode it behind its longest known beginning; None where the whole has to be encoded."""
        beginning, self._digest = self._conversations.find(self._raw, self._given)
        later = _messages_behind(self._raw, beginning) if beginning is not None else None
        if beginning is None or later is None:
            return None
        shown = self._conversations.template.render_later(later, beginning.shown) if later else ""
        if shown is None:
            return None
        text = f"{beginning.rest}{shown}{beginning.shown.behind}"
        if not text.startswith(beginning.proof):
            return None
        self._known = beginning
        self.chars = beginning.chars + len(text)
        segments = self._conversations.segments
        return segments.begin_behind(beginning.ids, text, add_special_tokens=add_special_tokens)

    def remember(self, encoding: Encoding, first: Mapping[str, Any] | None) -> None:
        """Remembers the messages when they are encoded; after `begin`.

        Args:
            encoding: Of the whole, or what `begin` answered.
            first: The first message; None: `begin` knew it.
        """
        raw, known = self._raw, self._known
        if known is not None:
            if len(raw) == len(known.raw):
                return
            shown: Later | None = known.shown
        elif first is not None:
            kwargs, generates = self._options["template_kwargs"], self._options["add_generation_prompt"]
            template = self._conversations.template
            shown = template.later(first, add_generation_prompt=generates, template_kwargs=kwargs)
        if shown is None or not encoding.text.endswith(shown.behind):
            return
        turns_end = len(encoding.text) - len(shown.behind)
        found = encoding.beginning(turns_end)
        if found is not None:
            chars, ids, proof = found
            rest = encoding.text[chars:turns_end]
            chars += known.chars if known is not None else 0
            beginning = Beginning(raw, ids, chars, rest, proof, shown)
            self._conversations.put(beginning, self._digest, self._given)


def last_message_end(messages: memoryview) -> int | None:
    """Where the last one of a list of messages ends; None where that cannot be seen at once."""
    tail = bytes(messages[-_END_BYTES_MAX:])
    end = tail.rfind(b"}") + 1
    if not end or tail[end:].strip(_SPACE) != b"]":
        return None
    return len(messages) - len(tail) + end


def _ends(raw: bytes, new_messages: int) -> Sequence[int]:
    """Where messages seem to end, the last first: of all, and of all but so many."""
    ends: list[int] = []
    at = len(raw)
    while at >= 0 and len(ends) <= new_messages and (end := raw.rfind(b"}", 0, at) + 1):
        ends.append(end)
        at = raw.rfind(_MESSAGE, 0, end)
    return ends


def _messages_behind(raw: bytes, beginning: Beginning) -> Sequence[Mapping[str, Any]] | None:
    """The messages behind a beginning; None where they are no messages, or not next to it."""
    rest = raw[len(beginning.raw) :].lstrip(_SPACE)
    if not rest:
        return ()
    if not rest.startswith(b","):
        return None
    try:
        # Whatever is wrong with them, whoever looks at all of them says so better.
        return chat_messages(msgspec.json.decode(b"[%b]" % rest[1:]), wants_parts=False)
    except (PromptError, ValueError, RecursionError):
        return None
