"""Generated token ids in, text that may be shown out: incremental decoding, and stop strings held back.

Pure; one TextAssembler per choice of a request. Knows nothing of HTTP or of the engine's thread.
"""

from dataclasses import dataclass
from typing import Literal

from model_server.requests import TokenOutput
from tokenization import IncrementalDecoder, PromptTokenizer

ChoiceEnd = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new in one choice.

    Attributes:
        text: May be empty while text is held back.
        finish_reason: Set on a choice's last delta.
        stop_reason: The stop string or stop token id that ended it, if one did.
    """

    text: str
    finish_reason: ChoiceEnd | None
    stop_reason: str | int | None = None


class TextAssembler:
    """Assembles one choice's text.

    Args:
        tokenizer: Decodes the ids.
        stop_strings: End the text before their first occurrence, however tokens split them.
        stop_token_ids: The request's own stop ids; the one that ended generation becomes the stop reason.
        min_tokens: No stop string counts before this many tokens.
        skip_special_tokens: Leave special tokens out of the text.

    Attributes:
        completion_tokens: Tokens generated so far.
        cached_tokens: Prompt tokens that came from the cache.
        finished: No more output is wanted.
    """

    def __init__(
        self,
        tokenizer: PromptTokenizer,
        *,
        stop_strings: tuple[str, ...] = (),
        stop_token_ids: frozenset[int] = frozenset(),
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip_special_tokens)
        self._stops = StopStrings(stop_strings)
        self._stop_token_ids = stop_token_ids
        self._min_tokens = min_tokens
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.finished = False

    def push(self, output: TokenOutput) -> Delta:
        """Take one output of the engine; its finish reason must not be "abort" or "error"."""
        assert not self.finished
        assert output.finish_reason in (None, "stop", "length")
        self.cached_tokens = output.cached_tokens
        # The stop token itself counts as generated but is not shown.
        shown = output.token_ids[:-1] if output.finish_reason == "stop" else output.token_ids
        text = ""
        for token_id in shown:
            self.completion_tokens += 1
            text += self._show(self._decoder.push(token_id))
            if self._stops.matched is not None:
                return self._finish(text, "stop", self._stops.matched)
        if output.finish_reason is None:
            return Delta(text, None)
        self.completion_tokens += len(output.token_ids) - len(shown)
        text += self._show(self._decoder.flush())
        if self._stops.matched is not None:
            return self._finish(text, "stop", self._stops.matched)
        ended_by = output.token_ids[-1] if output.finish_reason == "stop" and output.token_ids else None
        stop_reason = ended_by if ended_by in self._stop_token_ids else None
        return self._finish(text + self._stops.release(), output.finish_reason, stop_reason)

    def _show(self, text: str) -> str:
        return self._stops.push(text) if self.completion_tokens > self._min_tokens else text

    def _finish(self, text: str, reason: ChoiceEnd, stop_reason: str | int | None) -> Delta:
        self.finished = True
        return Delta(text, reason, stop_reason)


class StopStrings:
    """Finds the first of several strings in a text that comes in pieces.

    Attributes:
        matched: The string that was found; nothing may be pushed after it.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def push(self, piece: str) -> str:
        """Take the next piece; returns what can no longer be part of a stop string."""
        if not self._stops:
            return piece
        text = self._held + piece
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            # The first to be complete wins: the answer must not depend on how the text was cut into pieces.
            at, self.matched = min(found, key=lambda match: (match[0] + len(match[1]), match[0]))
            return text[:at]
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
