"""Generated token ids in, text that may be shown out: incremental decoding, and stop strings held back.

Pure; one TextAssembler per choice of a request. Knows nothing of HTTP or of the engine's thread.
"""

from collections.abc import Sequence
from itertools import islice
from typing import Literal

import msgspec

from model_server.requests import ChosenToken, TokenOutput
from tokenization import IncrementalDecoder, PromptTokenizer

ChoiceEnd = Literal["stop", "length"]


class Delta(msgspec.Struct, frozen=True, gc=False):
    """What is new in one choice."""

    text: str  # may be empty while text is held back
    finish_reason: ChoiceEnd | None  # set on a choice's last delta
    stop_reason: str | int | None = None  # the stop string or stop token id that ended it, if one did
    # The tokens that were counted, with their log probabilities, where these were asked for.
    tokens: tuple[ChosenToken, ...] = ()
    token_ids: tuple[int, ...] = ()  # ids of the tokens that were counted, where these were asked for


def joined(deltas: Sequence[Delta]) -> Delta:
    """All that one choice said, from its first delta to its last."""
    last = deltas[-1]
    tokens = tuple(token for delta in deltas for token in delta.tokens)
    token_ids = tuple(token_id for delta in deltas for token_id in delta.token_ids)
    text = "".join(delta.text for delta in deltas)
    return Delta(text, last.finish_reason, last.stop_reason, tokens, token_ids)


class TextAssembler:
    """Assembles one choice's text.

    Args:
        stop_strings: End the text at their first occurrence, however tokens split them.
        stop_token_ids: The request's own stop ids; the one that ended generation becomes the stop reason.
        min_tokens: No stop string counts before this many tokens.
        show_stop: Keep the stop string or stop token that ended the text in it.
        skip_special_tokens: Leave special tokens out of the text.
        tells_ids: Put the ids of the counted tokens into each delta.
    """

    def __init__(
        self,
        tokenizer: PromptTokenizer,
        *,
        stop_strings: tuple[str, ...] = (),
        stop_token_ids: frozenset[int] = frozenset(),
        min_tokens: int = 0,
        show_stop: bool = False,
        skip_special_tokens: bool = True,
        tells_ids: bool = False,
    ) -> None:
        self._tells_ids = tells_ids
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip_special_tokens)
        self._stops = StopStrings(stop_strings, show=show_stop)
        self._has_stops = bool(stop_strings)
        self._stop_token_ids = stop_token_ids
        self._min_tokens = min_tokens
        self._show_stop = show_stop
        self.completion_tokens = 0  # tokens generated so far
        self.cached_tokens = 0  # prompt tokens that came from the cache
        self.finished = False  # no more output is wanted

    def push(self, output: TokenOutput) -> Delta:
        """Take one output of the engine; its finish reason must not be "abort" or "error"."""
        assert not self.finished
        assert output.finish_reason in (None, "stop", "length")
        self.cached_tokens = output.cached_tokens
        says_more = self._has_stops or self._tells_ids or output.finish_reason or output.logprobs
        if not says_more:  # as nearly every token
            self.completion_tokens += len(output.token_ids)
            return Delta("".join(map(self._decoder.push, output.token_ids)), None)
        counted_before = self.completion_tokens
        text, reason, stop_reason = self._take(output)
        self.finished = reason is not None
        counted = self.completion_tokens - counted_before
        tokens = tuple(islice(map(ChosenToken, output.token_ids, output.logprobs or ()), counted))
        token_ids = tuple(output.token_ids[:counted]) if self._tells_ids else ()
        return Delta(text, reason, stop_reason, tokens, token_ids)

    def _take(self, output: TokenOutput) -> tuple[str, ChoiceEnd | None, str | int | None]:
        # The stop token itself counts as generated but is not shown.
        hides_last = output.finish_reason == "stop" and not self._show_stop
        shown = output.token_ids[:-1] if hides_last else output.token_ids
        text = ""
        for token_id in shown:
            self.completion_tokens += 1
            text += self._show(self._decoder.push(token_id))
            if self._stops.matched is not None:
                return text, "stop", self._stops.matched
        if output.finish_reason is None:
            return text, None, None
        self.completion_tokens += len(output.token_ids) - len(shown)
        text += self._show(self._decoder.flush())
        if self._stops.matched is not None:
            return text, "stop", self._stops.matched
        ended_by = output.token_ids[-1] if output.finish_reason == "stop" and output.token_ids else None
        stop_reason = ended_by if ended_by in self._stop_token_ids else None
        assert output.finish_reason in ("stop", "length")
        return text + self._stops.release(), output.finish_reason, stop_reason

    def _show(self, text: str) -> str:
        return self._stops.push(text) if self.completion_tokens > self._min_tokens else text


class StopStrings:
    """Finds the first of several strings in a text that comes in pieces; `show` keeps it in the text."""

    def __init__(self, stops: tuple[str, ...], *, show: bool = False) -> None:
        self._stops = stops
        self._show = show
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.matched: str | None = None  # the string that was found; nothing may be pushed after it

    def push(self, piece: str) -> str:
        """Take the next piece; returns what can no longer be part of a stop string."""
        if not self._stops:
            return piece
        text = self._held + piece
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            # The first to be complete wins: the answer must not depend on how the text was cut into pieces.
            at, self.matched = min(found, key=lambda match: (match[0] + len(match[1]), match[0]))
            return text[: at + len(self.matched)] if self._show else text[:at]
        held_from = self._first_open_match(text)
        self._held = text[held_from:]
        return text[:held_from]

    def release(self) -> str:
        """Return what is held back: no more text will come."""
        held, self._held = self._held, ""
        return held

    def _first_open_match(self, text: str) -> int:
        """Where the longest tail begins that could grow into a stop string; the text's end if none could."""
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            tail = text[at:]
            if any(stop.startswith(tail) for stop in self._stops):
                return at
        return len(text)
