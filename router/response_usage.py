"""A response's usage, read as its bytes pass: chunks of JSON or server-sent events in, cached tokens out.

OpenAI's APIs, Anthropic's messages and SGLang's /generate tell it, each in its own place and words. Keeps at
most what one JSON answer or one event line may be; what is larger goes unread. Changes nothing.
"""

from __future__ import annotations

from itertools import islice
from typing import Annotated

import msgspec

_KEPT_BYTES_MAX = 1 << 20
# A usage has some hundred bytes; what events tell of it one after the other is kept together.
_USAGE_BYTES_MAX = 4096
_USAGE_FIELDS_MAX = 64
_TOKENS_MAX = 2**31 - 1


class UsageReader:
    """Reads one response.

    Attributes:
        cached_tokens: `prompt_tokens_details.cached_tokens` or its like as far as seen; None if not told.
    """

    def __init__(self, *, is_event_stream: bool) -> None:
        self._is_event_stream = is_event_stream
        self._kept = b""
        self._lost = False
        self.cached_tokens: int | None = None
        # By name, as written; events of one response may each tell a part.
        self._told: dict[str, msgspec.Raw] = {}

    @property
    def usage_json(self) -> bytes | None:
        """All of `usage` as far as seen; None if not told."""
        return msgspec.json.encode(self._told) if self._told else None

    def feed(self, chunk: bytes) -> None:
        if self._is_event_stream:
            text = self._kept + chunk if self._kept else chunk
            end = text.rfind(b"\n") + 1
            self._kept = text[end:]
            # Of nearly all chunks no line needs to be looked at.
            if end and (b'"usage"' in text or b'"meta_info"' in text):
                for line in text[:end].split(b"\n"):
                    self._event_line(line)
        elif not self._lost:
            self._kept += chunk
        if len(self._kept) > _KEPT_BYTES_MAX:
            self._kept, self._lost = b"", True

    def end(self) -> None:
        if self._is_event_stream:
            self._event_line(self._kept)
        elif not self._lost:
            self._answer(self._kept)
        self._kept = b""

    def _event_line(self, line: bytes) -> None:
        if line.startswith(b"data:") and (b'"usage"' in line or b'"meta_info"' in line):
            self._answer(line[5:])

    def _answer(self, text: bytes) -> None:
        try:
            answer = msgspec.json.decode(text, type=_Answer)
            told = answer.told()
            usage = msgspec.json.decode(told, type=_Usage | None) if told else None
            if usage is None:
                return
            if len(told) <= _USAGE_BYTES_MAX:
                self._told |= msgspec.json.decode(told, type=dict[str, msgspec.Raw])
                self._told = dict(islice(self._told.items(), _USAGE_FIELDS_MAX))
        except (ValueError, RecursionError):
            return
        details = usage.prompt_tokens_details or usage.input_tokens_details
        cached_tokens = details.cached_tokens if details is not None else usage.cached()
        if cached_tokens is not None:
            self.cached_tokens = cached_tokens


_UNTOLD = msgspec.Raw()


_Tokens = Annotated[int, msgspec.Meta(ge=0, le=_TOKENS_MAX)]


class _Details(msgspec.Struct):
    cached_tokens: _Tokens | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    # Anthropic's, and SGLang's.
    cache_read_input_tokens: _Tokens | None = None
    cached_tokens: _Tokens | None = None

    def cached(self) -> int | None:
        return self.cached_tokens if self.cache_read_input_tokens is None else self.cache_read_input_tokens


class _Told(msgspec.Struct):
    usage: msgspec.Raw = _UNTOLD


class _Answer(msgspec.Struct):
    usage: msgspec.Raw = _UNTOLD
    # The Responses API tells its usage in its last event.
    response: _Told | None = None
    # Anthropic's first event tells the prompt's, a later one the answer's.
    message: _Told | None = None
    meta_info: msgspec.Raw = _UNTOLD

    def told(self) -> bytes:
        """The usage, wherever it stands; empty if it does not."""
        nested = self.response or self.message
        return bytes(self.usage) or (bytes(nested.usage) if nested else b"") or bytes(self.meta_info)
