"""Conversations that go on: a request's messages as JSON text in, the ids of what is known of them out.

What was decoded, rendered and encoded before is found by its digest, see `message_ends`, and costs no more
than that. For templates that show each message on its own, see `turn_form`; what is not surely the same is
left to others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tokenization.beginnings import NOWHERE, Beginning, Beginnings, Shown
from tokenization.chat_messages import chat_messages, plain_messages
from tokenization.chat_template import ChatTemplate
from tokenization.decoded_bytes import decoded_bytes
from tokenization.errors import PromptError
from tokenization.item_counts import ITEMS_AT_ONCE_MAX, items_of
from tokenization.message_ends import MessagesEnd, last_message_end, messages_behind, shared_end
from tokenization.segment_memory import TokenIds
from tokenization.segments import Encoding, SegmentEncoder
from tokenization.turn_form import FIRST
from tokenization.turns import Later, options_key


class Conversations:
    """Conversations with one model; safe to share between threads.

    Args:
        capacity_bytes: Most memory for what is remembered of them.

    Attributes:
        beginnings: What that is.
    """

    def __init__(self, template: ChatTemplate, segments: SegmentEncoder, capacity_bytes: int) -> None:
        self.template = template
        self.segments = segments
        self.beginnings: Beginnings[Beginning] = Beginnings(capacity_bytes)

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
        given, view = options_key(options["template_kwargs"]), memoryview(messages)
        end = ends[0].size_bytes if ends else last_message_end(view)
        if given is None or end is None:
            return None
        return Conversation(self, view[:end], ends, (options["add_generation_prompt"], given), options)


class Conversation:
    """One request's messages.

    Attributes:
        chars: How many characters they show; known behind `begin`.
        missing_chars: How many of them `ids` has to encode.
    """

    __slots__ = (
        *("_conversations", "_digest", "_encoding", "_ends", "_given", "_known", "_known_end", "_messages"),
        *("_first", "_options", "_text", "chars", "missing_chars"),
    )

    def __init__(
        self,
        conversations: Conversations,
        messages: memoryview,
        ends: Sequence[MessagesEnd],
        given: object,
        options: Mapping[str, Any],
    ) -> None:
        self.chars = self.missing_chars = 0
        self._conversations = conversations
        self._messages = messages
        self._ends = ends
        self._given = given
        self._options = options
        self._known: Beginning | None = None
        self._known_end = NOWHERE
        self._digest = b""
        self._text = ""
        self._encoding: Encoding | None = None
        self._first: Mapping[str, Any] | None = None

    def begin(self, *, add_special_tokens: bool) -> bool:
        """Looks up its longest known beginning, for `ids`; False: the whole has to be encoded."""
        conversations, messages = self._conversations, self._messages
        known, self._known_end, self._digest = conversations.beginnings.find(
            messages, self._ends, self._given
        )
        if known is None:
            return False
        shown = known.shown
        new = _shown_behind(messages, self._known_end.size_bytes, conversations.template, shown.later)
        if new is None:
            return False
        segments, closing = conversations.segments, shown.later.behind
        text = known.rest + new
        if not text.startswith(known.proof) and not (text + closing).startswith(known.proof):
            return False
        self._known, self._text = known, text
        self.chars = known.chars + len(text) + len(closing)
        if shown.closing is not None and segments.is_short(text) and not add_special_tokens:
            self.missing_chars = len(text)
            return True
        self._encoding = segments.begin_behind(
            known.ids, text + closing, add_special_tokens=add_special_tokens
        )
        self.missing_chars = self._encoding.missing_chars
        return True

    def ids(self) -> TokenIds:
        """Encodes what is missing and remembers it; after `begin`. Do not write to the array."""
        known, encoding = self._known, self._encoding
        assert known is not None
        is_new = self._known_end.size_bytes < len(self._messages)
        if encoding is not None:
            ids = encoding.ids()
            closing = known.shown.later.behind
            if is_new and encoding.text.endswith(closing):
                end = len(encoding.text) - len(closing)
                self._put(_beginning(encoding, known.shown, known.chars, end))
            return ids
        shown = known.shown
        assert shown.closing is not None
        ids = self._conversations.segments.ids_between(known.ids, self._text, shown.closing)
        if is_new:
            chars, tokens = known.chars + len(self._text), len(ids) - len(shown.closing)
            self._put(Beginning(ids[:tokens], chars, "", shown.proof, shown))
        return ids

    def render(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Takes messages of which nothing is known; what they show is for the template to say."""
        self._first = messages[0]

    def remember(self, encoding: Encoding) -> None:
        """Remembers them, when they are encoded."""
        assert self._first is not None
        kwargs, generates = self._options["template_kwargs"], self._options["add_generation_prompt"]
        template, segments = self._conversations.template, self._conversations.segments
        later = template.later(self._first, add_generation_prompt=generates, template_kwargs=kwargs)
        if later is None or not encoding.text.endswith(later.behind):
            return
        proof, end = later.behind[: segments.proof_chars], len(encoding.text) - len(later.behind)
        size_bytes = decoded_bytes(later.variables[FIRST])
        shown = Shown(later, segments.closing_ids(later.behind), proof, size_bytes)
        self._put(_beginning(encoding, shown, 0, end))
        shared = shared_end(self._messages)
        last = None if shared is None else _shown_behind(self._messages, shared.size_bytes, template, later)
        if shared is None or last is None or not encoding.text.endswith(last, 0, end):
            return
        if (beginning := _beginning(encoding, shown, 0, end - len(last))) is not None:
            self._conversations.beginnings.share(beginning, shared.digest, self._given)

    def _put(self, beginning: Beginning | None) -> None:
        if beginning is not None:
            self._conversations.beginnings.put(beginning, self._digest, self._given, self._known_end)


def _beginning(encoding: Encoding, shown: Shown, known_chars: int, turns_end: int) -> Beginning | None:
    """What is known of messages that end there in an encoded text, in front of which others were known."""
    found = encoding.beginning(turns_end)
    if found is None:
        return None
    chars, ids, proof = found
    return Beginning(ids, known_chars + chars, encoding.text[chars:turns_end], proof, shown)


def _shown_behind(messages: memoryview, end: int, template: ChatTemplate, later: Later) -> str | None:
    """What the messages behind a beginning show; None where that has to be told from all of them."""
    if end == len(messages):
        return ""
    text = messages_behind(messages, end)
    if text is None:
        return None
    if (plain := plain_messages(text)) is not None:
        shown = template.render_plain(plain, later)
        if shown is not None:
            return shown
    try:
        decoded = msgspec.json.decode(text)
        if items_of(decoded) > ITEMS_AT_ONCE_MAX:
            return None
        # Whatever is wrong with them, whoever looks at all of them says so better.
        return template.render_later(chat_messages(decoded, wants_parts=False), later)
    except (PromptError, ValueError, RecursionError):
        return None
