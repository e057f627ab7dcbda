"""A response's usage, read as its bytes pass: chunks of JSON or server-sent events in, cached tokens out.

Keeps at most what one JSON answer or one event line may be; what is larger goes unread. Changes nothing.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

_KEPT_BYTES_MAX = 1 << 20
_TOKENS_MAX = 2**31 - 1


class UsageReader:
    """Reads one response.

    Attributes:
        cached_tokens: `usage.prompt_tokens_details.cached_tokens` as far as seen; None if not told.
        usage_json: All of `usage`, as it is written; None if not told.
    """

    def __init__(self, *, is_event_stream: bool) -> None:
        self._is_event_stream = is_event_stream
        self._kept = b""
        self._lost = False
        self.cached_tokens: int | None = None
        self.usage_json: bytes | None = None

    def feed(self, chunk: bytes) -> None:
        """Takes the next bytes."""
        if self._is_event_stream:
            *lines, self._kept = (self._kept + chunk).split(b"\n")
            for line in lines:
                self._event_line(line)
        elif not self._lost:
            self._kept += chunk
        if len(self._kept) > _KEPT_BYTES_MAX:
            self._kept, self._lost = b"", True

    def end(self) -> None:
        """The response is complete."""
        if self._is_event_stream:
            self._event_line(self._kept)
        elif not self._lost:
            self._answer(self._kept)
        self._kept = b""

    def _event_line(self, line: bytes) -> None:
        if line.startswith(b"data:") and b'"usage"' in line:
            self._answer(line[5:])

    def _answer(self, text: bytes) -> None:
        try:
            answer = msgspec.json.decode(text, type=_Answer)
            nested = answer.response.usage if answer.response is not None else _UNTOLD
            told = bytes(answer.usage) or bytes(nested)
            usage = msgspec.json.decode(told, type=_Usage | None) if told else None
        except (ValueError, RecursionError):
            return
        if usage is None:
            return
        self.usage_json = told
        details = usage.prompt_tokens_details or usage.input_tokens_details
        if details is not None:
            self.cached_tokens = details.cached_tokens


_UNTOLD = msgspec.Raw()


class _Details(msgspec.Struct):
    cached_tokens: Annotated[int, msgspec.Meta(ge=0, le=_TOKENS_MAX)] | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None


class _Told(msgspec.Struct):
    usage: msgspec.Raw = _UNTOLD


class _Answer(msgspec.Struct):
    usage: msgspec.Raw = _UNTOLD
    # The Responses API tells its usage in its last event.
    response: _Told | None = None
