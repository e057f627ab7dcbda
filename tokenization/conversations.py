"""Conversations that go on: a request's messages as JSON text in, the ids of what is known of them out.

What was decoded, rendered and encoded before is found by its digest, see `message_ends`, and costs no more
than that. For templates that show each message on its own, see `turn_form`; what is not surely the same is
left to others.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from tokenization.chat_messages import chat_messages
from tokenization.chat_template import ChatTemplate
from tokenization.errors import PromptError
from tokenization.message_ends import NEW_MESSAGES, MessagesEnd, last_message_end, message_ends
from tokenization.segment_memory import TokenIds
from tokenization.segments import Encoding, SegmentEncoder
from tokenization.turn_form import FIRST
from tokenization.turns import Later, options_key

_SPACE = b" \t\r\n"
_ENTRY_BYTES = 1200

_Key: TypeAlias = tuple[object, bytes]


class Beginning(msgspec.Struct, frozen=True, eq=False):
    """Messages that a conversation begins with.

    Attributes:
        ids: Ids of what they show, as far as these are the same whatever follows.
        chars: How many characters these stand for.
        rest: What they show behind these.
        proof: What has to follow these characters, for their ids to be what they are.
        shown: How later messages are shown.
        is_cut: Whether a text may be cut where what stands behind the messages begins.
    """

    ids: TokenIds
    chars: int
    rest: str
    proof: str
    shown: Later
    is_cut: bool

    @property
    def size_bytes(self) -> int:
        """Memory in use."""
        texts = self.rest, self.shown.variables[FIRST]["content"]
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
        self._beginnings: OrderedDict[_Key, Beginning] = OrderedDict()
        self._lock = threading.Lock()

    def open(
        self, messages: msgspec.Raw, options: Mapping[str, Any], ends: Sequence[MessagesEnd] = ()
    ) -> Conversation | None:
        """A request's conversation; None where its messages may be shown otherwise than one by one.

        Args:
            options: As for `ChatTemplate.render`.
            ends: Of the messages, the longest first; none where they are not known.
        """
        if not self.template.has_turns or options["tools"] is not None or options["documents"] is not None:
            return None
        if options["continue_final_message"]:
            return None
        kwargs, generates = options["template_kwargs"], options["add_generation_prompt"]
        given, view = options_key(kwargs), memoryview(messages)
        end = ends[0].size_bytes if ends else last_message_end(view)
        if given is None or end is None:
            return None
        return Conversation(self, view[:end], ends, (generates, given), options)

    def find(
        self, messages: memoryview, ends: Sequence[MessagesEnd], given: object
    ) -> tuple[Beginning | None, MessagesEnd, bytes]:
        """The longest known beginning of a list of messages, its end, and the digest of all of it.

        Args:
            messages: From the opening bracket to the last one's end.
            ends: Those that are known already.
        """
        for new_messages in NEW_MESSAGES:
            if len(ends) <= new_messages:
                text = bytes(messages)
                ends = message_ends(text, 0, len(text), new_messages)
            for end in ends:
                beginning = self._beginnings.get((given, end.digest))
                if beginning is not None:
                    self._use((given, end.digest))
                    return beginning, end, ends[0].digest
        return None, ends[0], ends[0].digest

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


class Conversation:
    """One request's messages.

    Attributes:
        chars: How many characters they show; known behind `begin`.
    """

    __slots__ = (
        *("_conversations", "_digest", "_ends", "_given", "_known", "_known_bytes", "_messages", "_options"),
        "chars",
    )

    def __init__(
        self,
        conversations: Conversations,
        messages: memoryview,
        ends: Sequence[MessagesEnd],
        given: object,
        options: Mapping[str, Any],
    ) -> None:
        self.chars = 0
        self._conversations = conversations
        self._messages = messages
        self._ends = ends
        self._given = given
        self._options = options
        self._known: Beginning | None = None
        self._known_bytes = 0
        self._digest = b""

    def begin(self, *, add_special_tokens: bool) -> Encoding | None:
        """Begins to encode it behind its longest known beginning; None where the whole has to be encoded."""
        conversations, messages = self._conversations, self._messages
        beginning, end, self._digest = conversations.find(messages, self._ends, self._given)
        later = _messages_behind(messages, end.size_bytes) if beginning is not None else None
        if beginning is None or later is None:
            return None
        shown = conversations.template.render_later(later, beginning.shown) if later else ""
        if shown is None:
            return None
        text, closing = beginning.rest + shown, beginning.shown.behind
        if not (text + closing).startswith(beginning.proof):
            return None
        self._known, self._known_bytes = beginning, end.size_bytes
        self.chars = beginning.chars + len(text) + len(closing)
        if not beginning.is_cut:
            text, closing = text + closing, ""
        segments = conversations.segments
        return segments.begin_behind(beginning.ids, text, closing, add_special_tokens=add_special_tokens)

    def remember(self, encoding: Encoding, first: Mapping[str, Any] | None = None) -> None:
        """Remembers the messages when they are encoded; after `begin`.

        Args:
            encoding: Of the whole, or what `begin` answered.
            first: The first message; None: `begin` knew it.
        """
        known = self._known
        if known is not None:
            if self._known_bytes == len(self._messages):
                return
            shown: Later | None = known.shown
            is_cut = known.is_cut
        elif first is not None:
            kwargs, generates = self._options["template_kwargs"], self._options["add_generation_prompt"]
            template = self._conversations.template
            shown = template.later(first, add_generation_prompt=generates, template_kwargs=kwargs)
            is_cut = shown is not None and self._conversations.segments.is_cut_before(shown.behind)
        if shown is None or not encoding.text.endswith(shown.behind):
            return
        turns_end = len(encoding.text) - len(shown.behind)
        found = encoding.beginning(turns_end)
        if found is not None:
            chars, ids, proof = found
            rest = encoding.text[chars:turns_end]
            chars += known.chars if known is not None else 0
            beginning = Beginning(ids, chars, rest, proof, shown, is_cut)
            self._conversations.put(beginning, self._digest, self._given)


def _messages_behind(messages: memoryview, end: int) -> Sequence[Mapping[str, Any]] | None:
    """The messages behind a beginning; None where they are no messages, or not next to it."""
    rest = bytes(messages[end:]).lstrip(_SPACE)
    if not rest:
        return ()
    if not rest.startswith(b","):
        return None
    try:
        # Whatever is wrong with them, whoever looks at all of them says so better.
        return chat_messages(msgspec.json.decode(b"[%b]" % rest[1:]), wants_parts=False)
    except (PromptError, ValueError, RecursionError):
        return None
