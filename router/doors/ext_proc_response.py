"""The response half of an ext_proc stream: messages in, echoes out, and what they tell of the outcome.

Messages are read before they are answered: after the last answer Envoy may reset the stream. A usage is read
as its bytes pass.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Annotated

import msgspec
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from router.doors.ext_proc_messages import BodyMode, header_values, set_headers, streamed_answers
from router.feedback.lifecycle import RESPONSE, Lifecycle
from router.picking.decision import Decision
from router.plugins.attribute_reporter import AttributeReporter

_KEPT_BYTES_MAX = 1 << 20
# A usage has some hundred bytes; what events tell of it one after the other is kept together.
_USAGE_BYTES_MAX = 4096
_USAGE_FIELDS_MAX = 64
_TOKENS_MAX = 2**31 - 1
# Every chunk would look it up.
_FULL_DUPLEX_STREAMED, _NONE = BodyMode.FULL_DUPLEX_STREAMED, BodyMode.NONE


class ResponsePhase:
    """One response.

    Events are echoed at once, chunk by chunk, and so is any other body unless bodies are held: then that is
    kept, with a bound, until it is whole, so that the model's name can be restored wherever it stands.

    Args:
        held_bytes_max: A longer body is echoed as it comes, unchanged from there on; 0: none is held.
    """

    def __init__(
        self, lifecycle: Lifecycle, held_bytes_max: int = 0, reporter: AttributeReporter | None = None
    ) -> None:
        self._lifecycle = lifecycle
        self._held_bytes_max = held_bytes_max
        self._reporter = reporter
        self._held: bytearray | None = bytearray() if held_bytes_max else None
        # As long as its request is not over; None for one that is no work, too.
        self.awaited: Decision | None = None
        self.models = ("", "")  # names of the model: the pod's, the client's
        self._usage: UsageReader | None = None
        self._failed, self._refused = True, False
        self._sees_body = True
        self._awaits_first_token = False

    def of(self, decision: Decision) -> None:
        """The response is to this request."""
        # Of what the ledger does not have there is nothing to tell; it may have another request of that id.
        if decision.is_charged:
            self.awaited = decision

    def streams(self) -> None:
        """The client asked for a stream: chunks are echoed as they come, whatever the headers say."""
        self._held = None

    def headers(self, message: pb.HttpHeaders, mode: int) -> dict[str, str]:
        """Read and return the response's headers; `mode`: how the body will come here."""
        headers = header_values(message.headers)
        content_type = headers.get("content-type", "")
        is_event_stream = "text/event-stream" in content_type
        if is_event_stream:
            self._held = None
        # Of an answer in one piece, the first byte is no earlier than the last token.
        self._awaits_first_token = is_event_stream
        status = headers.get(":status", "200")
        self._failed, self._refused = status >= "500" or _has_grpc_failed(headers), "400" <= status < "500"
        self._sees_body = mode != _NONE
        self._usage = UsageReader(is_event_stream=is_event_stream)
        # An answer in one piece is made when its headers come, whoever sees the rest of it; gRPC's are not.
        comes_in_pieces = is_event_stream or content_type.startswith("application/grpc")
        if message.end_of_stream or not (self._sees_body or comes_in_pieces):
            self._whole()
        return headers

    def body(self, message: pb.HttpBody, mode: int) -> Iterable[pb.ProcessingResponse]:
        """Read a chunk of the response's body and return its echoes."""
        data, is_last = message.body, message.end_of_stream
        if self._awaits_first_token and (sent := self.awaited) is not None:
            self._awaits_first_token = False
            self._lifecycle.first_token(
                sent.request_id, RESPONSE, time.monotonic(), pod=sent.primary.pod, dispatched_s=sent.decided_s
            )
        if self._usage is not None:
            self._usage.feed(data)
        if is_last:
            self._whole()
        if mode != _FULL_DUPLEX_STREAMED:
            return (self._in_place(data, is_last),)
        if self._held is not None:
            self._held += data
            if not is_last and len(self._held) <= self._held_bytes_max:
                return ()
            data, self._held = bytes(self._held), None
        return self._echoes(data, end_of_stream=is_last)

    def trailers(self, message: pb.HttpTrailers) -> Iterator[pb.ProcessingResponse]:
        """Answer the response's trailers, which end it, after what was held."""
        if _has_grpc_failed(header_values(message.trailers)):
            self._failed = True
        self._whole()
        if self._held:
            data, self._held = bytes(self._held), None
            yield from self._echoes(data, end_of_stream=False)
        yield pb.ProcessingResponse(response_trailers=pb.TrailersResponse())

    def cut(self) -> None:
        """The response is cut off, if it is not over."""
        self._ended(failed=True)

    def close(self) -> None:
        """The stream is over; unless the response was, it was cut off, or its end is for others to tell."""
        # Envoy closes the stream behind the headers where it keeps the body to itself.
        if self._sees_body:
            self.cut()

    def _echoes(self, data: bytes, *, end_of_stream: bool) -> Iterator[pb.ProcessingResponse]:
        data = restored_model(data, *self.models)
        for answer in streamed_answers("response_body", data, end_of_stream=end_of_stream):
            if answer.response_body.response.body_mutation.streamed_response.end_of_stream:
                self._report(answer)
            yield answer

    def _in_place(self, data: bytes, is_last: bool) -> pb.ProcessingResponse:
        """Return the answer to a body that Envoy keeps; only a changed one is sent back."""
        answer = pb.ProcessingResponse(response_body=pb.BodyResponse())
        restored = restored_model(data, *self.models)
        if restored is not data:
            common = answer.response_body.response
            common.body_mutation.body = restored
            set_headers(common.header_mutation, {"content-length": str(len(restored))})
        if is_last:
            self._report(answer)
        return answer

    def _report(self, answer: pb.ProcessingResponse) -> None:
        if self._reporter is None or self._usage is None or (usage := self._usage.usage_json) is None:
            return
        if told := self._reporter.report(usage):
            answer.dynamic_metadata.update(told)

    def _whole(self) -> None:
        """The response is complete."""
        if self._usage is not None:
            self._usage.end()
        self._ended(failed=self._failed)

    def _ended(self, *, failed: bool) -> None:
        sent, self.awaited = self.awaited, None
        if sent is None:
            return
        self._lifecycle.ended(
            sent.request_id,
            RESPONSE,
            time.monotonic(),
            pod=sent.primary.pod,
            dispatched_s=sent.decided_s,
            failed=failed,
            refused=self._refused,
            cached_tokens=self._usage.cached_tokens if self._usage is not None else None,
        )


def _has_grpc_failed(headers: Mapping[str, str]) -> bool:
    """gRPC answers 200 whatever happened, and tells in its trailers, or in headers without a body."""
    return headers.get("grpc-status", "0") != "0"


class UsageReader:
    """Reads a response's usage: chunks of JSON or server-sent events in, cached tokens out.

    OpenAI's APIs, Anthropic's messages and SGLang's /generate tell it, each in its own place and words. Keeps
    at most what one JSON answer or one event line may be; what is larger goes unread.

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
            # In nearly all chunks no line needs to be looked at.
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


def restored_model(body: bytes, target: str, client: str) -> bytes:
    """A response, or a piece of one, with the model named as the client named it.

    Every `"model":"TARGET"` is replaced; only where there is none, every `"model": "TARGET"`.
    """
    if not target or not client or target == client:
        return body
    before, after = msgspec.json.encode(target), msgspec.json.encode(client)
    for lead in (b'"model":', b'"model": '):
        if lead + before in body:
            return body.replace(lead + before, lead + after)
    return body
