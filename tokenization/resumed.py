"""Conversations whose templates look around: messages as JSON text in, the ids of what is known of them out.

As `conversations`, where turns do not show each on its own but the loop over the messages may be taken up
again, see `loop_form`: what was decoded, rendered and encoded before is found by its digest. Each use is
checked against the whole rendering at first, and now and then later: an error in it would route every long
conversation wrongly.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tokenization.beginnings import NOWHERE, Beginnings
from tokenization.chat_messages import chat_messages
from tokenization.chat_template import ChatTemplate
from tokenization.decoded_bytes import decoded_bytes
from tokenization.errors import PromptError
from tokenization.item_counts import ITEMS_AT_ONCE_MAX, items_of
from tokenization.loop_run import Message, Rounds, Shown
from tokenization.message_ends import MessagesEnd, last_message_end, messages_behind, shared_end
from tokenization.segment_memory import TokenIds
from tokenization.segments import Encoding, SegmentEncoder

_log = logging.getLogger(__name__)

# Shorter ones are rendered in less time than it takes to tell what may be left out.
_LEAST_BYTES = 4 << 10
_SHARED_LEAST_CHARS = 2 << 10
# After so many conversations that could not be taken up again, only one of so many others is tried.
_REFUSALS_MAX, _TRY_EVERY = 32, 32
# Uses that are checked: all of the first ones, then one of so many.
_CHECKS_FIRST, _CHECK_EVERY = 8, 256
_ENTRY_BYTES, _CHAR_BYTES_MAX = 1500, 4


class Known(msgspec.Struct, frozen=True, eq=False):
    """Messages that a conversation begins with.

    Attributes:
        messages: As the template has them.
        rounds: Of the template's loop, those that need not be shown again.
        before: What stands in front of the loop.
        ids: Ids of what they and `before` show, as far as these are the same whatever follows.
        chars: How many characters these stand for.
        rest: What they show behind these.
        proof: What has to follow these characters, for their ids to be what they are.
        messages_bytes: Memory of the messages.
        size_bytes: Memory in use, about.
    """

    messages: Sequence[Message]
    rounds: Rounds
    before: str
    ids: TokenIds
    chars: int
    rest: str
    proof: str
    messages_bytes: int
    size_bytes: int


class ResumedConversations:
    """Conversations with one template; safe to share between threads.

    Args:
        capacity_bytes: Most memory for what is remembered of them.

    Attributes:
        beginnings: What that is.
        uses: How often known messages were left out.
        faults: Checks that failed; after one nothing is left out any more.
    """

    def __init__(self, template: ChatTemplate, segments: SegmentEncoder, capacity_bytes: int) -> None:
        self.template = template
        self.segments = segments
        self.beginnings: Beginnings[Known] = Beginnings(capacity_bytes)
        self.uses = self.faults = 0
        self._refusals = self._passed = 0

    def open(
        self, messages: msgspec.Raw, options: Mapping[str, Any], ends: Sequence[MessagesEnd] = ()
    ) -> ResumedConversation | None:
        """A request's conversation; None where all of its messages have to be rendered.

        Args:
            options: As for `ChatTemplate.render`.
            ends: Of the messages, the longest first; none where they are not known.
        """
        view = memoryview(messages)
        if len(view) < _LEAST_BYTES or self.faults or options["continue_final_message"] or self._is_in_vain():
            return None
        end = ends[0].size_bytes if ends else last_message_end(view)
        return None if end is None else ResumedConversation(self, view[:end], ends, options)

    def is_right(
        self, messages: Sequence[Message], options: Mapping[str, Any], shown: Shown, chars: int
    ) -> bool:
        """Whether what is shown behind known messages is right; most uses are not checked.

        Args:
            chars: How many the whole should have.
        """
        self.uses += 1
        if self.uses > _CHECKS_FIRST and self.uses % _CHECK_EVERY:
            return True
        whole = self.template.render(messages, **options)
        new = "".join((*shown.rounds, shown.behind))
        if not whole.startswith(shown.before) or (len(whole) == chars and whole.endswith(new)):
            return True
        self.faults += 1
        _log.error(
            "a chat template was rendered wrongly behind known messages (%d characters, %d if rendered as a "
            "whole); from now on it is always rendered as a whole, which costs time. Please report this.",
            *(chars, len(whole)),
        )
        return False

    def _is_in_vain(self) -> bool:
        """Whether to let a request go, as no conversation of late could be taken up again."""
        if self._refusals < _REFUSALS_MAX:
            return False
        self._passed += 1
        return self._passed % _TRY_EVERY > 0

    def rendered(self, shown: Shown | None) -> None:
        """A whole conversation was rendered so that it may be taken up again; None: that cannot be."""
        self._refusals = 0 if shown is not None and shown.resumable is not None else self._refusals + 1


class ResumedConversation:
    """One request's messages.

    Attributes:
        chars: How many characters they show; known behind `begin`.
        missing_chars: How many of them `ids` has to encode.
    """

    __slots__ = (
        *("_conversations", "_digest", "_encoding", "_ends", "_known", "_known_end", "_messages"),
        *("_options", "_shown", "_text", "chars", "missing_chars"),
    )

    def __init__(
        self,
        conversations: ResumedConversations,
        text: memoryview,
        ends: Sequence[MessagesEnd],
        options: Mapping[str, Any],
    ) -> None:
        self.chars = self.missing_chars = 0
        self._conversations = conversations
        self._text = text
        self._ends = ends
        self._options = options
        self._known: Known | None = None
        self._known_end = NOWHERE
        self._digest = b""
        self._messages: Sequence[Message] = ()
        self._shown: Shown | None = None
        self._encoding: Encoding | None = None

    def begin(self, *, add_special_tokens: bool) -> bool:
        """Looks up its longest known beginning, for `ids`; False: the whole has to be encoded."""
        conversations = self._conversations
        known, self._known_end, self._digest = conversations.beginnings.find(self._text, self._ends, None)
        new = None if known is None else self._new_messages()
        if known is None or new is None:
            return False
        messages = [*known.messages, *new]
        shown = conversations.template.resume(messages, known.rounds, self._options)
        if shown is None or shown.before != known.before:
            return False
        text = "".join((known.rest, *shown.rounds, shown.behind))
        chars = known.chars + len(text)
        if not text.startswith(known.proof) or not conversations.is_right(
            messages, self._options, shown, chars
        ):
            return False
        self._known, self._shown, self._messages, self.chars = known, shown, messages, chars
        self._encoding = conversations.segments.begin_behind(
            known.ids, text, add_special_tokens=add_special_tokens
        )
        self.missing_chars = self._encoding.missing_chars
        return True

    def ids(self) -> TokenIds:
        """Encodes what is missing and remembers it; after `begin`. Do not write to the array."""
        known, shown, encoding = self._known, self._shown, self._encoding
        assert known is not None
        assert shown is not None
        assert encoding is not None
        ids = encoding.ids()
        if shown.resumable is not None and self._known_end.size_bytes < len(self._text):
            self._put(self._of(encoding, shown.resumable, self._messages))
        return ids

    def render(self, messages: list[dict[str, Any]]) -> str | None:
        """What messages show of which nothing is known; None where only the template itself can tell."""
        shown = self._conversations.template.resume(messages, None, self._options)
        self._conversations.rendered(shown)
        if shown is None:
            return None
        self._shown, self._messages = shown, messages
        return "".join((shown.before, *shown.rounds, shown.behind))

    def remember(self, encoding: Encoding) -> None:
        """Remembers what was rendered, when it is encoded; also without the last message."""
        shown, messages = self._shown, self._messages
        if shown is None:
            return
        if shown.resumable is not None:
            self._put(self._of(encoding, shown.resumable, messages))
        earlier, shared = shown.earlier, shared_end(self._text)
        if shared is None or earlier is None or self._chars(earlier) < _SHARED_LEAST_CHARS:
            return
        if (known := self._of(encoding, earlier, messages[:-1])) is not None:
            self._conversations.beginnings.share(known, shared.digest, None)

    def _new_messages(self) -> list[dict[str, Any]] | None:
        """The messages behind the known ones; None where there is something wrong with them."""
        text = messages_behind(self._text, self._known_end.size_bytes)
        if text is None:
            return None
        try:
            messages = msgspec.json.decode(text)
            if items_of(messages) > ITEMS_AT_ONCE_MAX:
                return None
            # Whatever is wrong with them, whoever looks at all of them says so better.
            return chat_messages(messages, wants_parts=self._conversations.template.wants_parts)
        except (PromptError, ValueError, RecursionError):
            return None

    def _chars(self, rounds: Rounds) -> int:
        """How far these go in the text that is encoded."""
        known, shown = self._known, self._shown
        assert shown is not None
        in_front, left_out = (
            (len(shown.before), 0) if known is None else (len(known.rest), known.rounds.shown)
        )
        return in_front + sum(map(len, shown.rounds[: rounds.shown - left_out]))

    def _of(self, encoding: Encoding, rounds: Rounds, messages: Sequence[Message]) -> Known | None:
        """What is known of these messages, of which these rounds may be left out next time."""
        known, shown, end = self._known, self._shown, self._chars(rounds)
        assert shown is not None
        found = encoding.beginning(end)
        if found is None:
            return None
        chars, ids, proof = found
        rest, before = encoding.text[chars:end], shown.before
        new, messages_bytes = messages, 0
        if known is not None:
            chars += known.chars
            new, messages_bytes = messages[len(known.messages) :], known.messages_bytes
        # By what they take decoded: a client can make that fifty times their JSON text.
        messages_bytes += sum(map(decoded_bytes, new))
        size_bytes = _ENTRY_BYTES + ids.nbytes + messages_bytes + sys.getsizeof(messages)
        size_bytes += _CHAR_BYTES_MAX * (len(rest) + len(before)) + rounds.size_bytes
        return Known(messages, rounds, before, ids, chars, rest, proof, messages_bytes, size_bytes)

    def _put(self, known: Known | None) -> None:
        if known is not None:
            self._conversations.beginnings.put(known, self._digest, None, self._known_end)
