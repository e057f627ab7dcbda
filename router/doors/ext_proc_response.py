"""Response half of an ext_proc stream: passes the response on and reports first token, end and usage.

A message is processed before it is answered, because Envoy may reset the stream after the last answer.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Annotated

import msgspec
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from router.doors.ext_proc_dialects import BodyMode, header_values, set_headers, streamed_body_responses
from router.feedback.lifecycle import Lifecycle
from router.feedback.outcomes import DONE, FAILED, RESPONSE, RequestReport, end_event
from router.picking.decision import Decision
from router.plugins.attribute_reporter import AttributeReporter

_KEPT_BYTES_MAX = 1 << 20
# Statuses of requests for what an engine lacks, and of Envoy's time limits.
_NO_FAULTS = ("501", "504")
_GRPC_FAULTS = ("2", "13", "14", "15")  # unknown, internal, unavailable, data loss
# A usage has some hundred bytes. Its fields are merged over all events of a response, up to these limits.
_USAGE_BYTES_MAX = 4096
_USAGE_FIELDS_MAX = 64
_TOKENS_MAX = 2**31 - 1
# Looking up protobuf enum members for every chunk is slow.
_FULL_DUPLEX_STREAMED, _NONE = BodyMode.FULL_DUPLEX_STREAMED, BodyMode.NONE


class ResponsePhase:
    """One HTTP response on its way to the client.

    Server-sent events are passed on chunk by chunk. Other bodies are buffered until complete, so that the
    client's model name can be restored even where it spans two chunks.

    Args:
        buffered_bytes_max: Longer bodies are passed on chunk by chunk; 0: all are.
    """

    def __init__(
        self, lifecycle: Lifecycle, buffered_bytes_max: int = 0, reporter: AttributeReporter | None = None
    ) -> None:
        self._lifecycle = lifecycle
        self._buffered_bytes_max = buffered_bytes_max
        self._reporter = reporter
        # Beginning of the body; None: chunks are passed on as they arrive.
        self.buffered: bytearray | None = bytearray() if buffered_bytes_max else None
        # Decision whose request has not ended; None: the request has ended, or is not in the ledger.
        self.pending: Decision | None = None
        self.models = ("", "")  # the model's name at the pod, and the client's name for it
        self._usage: UsageReader | None = None
        self._event, self._is_fault = FAILED, False
        self._sees_body = True
        self._awaits_first_token = False

    def expect(self, decision: Decision) -> None:
        """Associate the response with a routed request."""
        # Requests without work are not in the ledger, which may hold another request under the same id.
        if decision.is_charged:
            self.pending = decision

    def headers(self, message: pb.HttpHeaders, mode: int) -> dict[str, str]:
        """Process the response headers and return them; `mode`: Envoy's mode for the response body."""
        headers = header_values(message.headers)
        content_type = headers.get("content-type", "")
        is_event_stream = "text/event-stream" in content_type
        if is_event_stream:
            self.buffered = None
        # A response that is not streamed has no first token: its first byte follows the last token.
        self._awaits_first_token = is_event_stream
        status = headers.get(":status", "200")
        has_failed = status >= "500" or _has_grpc_failed(headers)
        self._event = end_event(failed=has_failed, refused="400" <= status < "500")
        self._is_fault = _is_fault(headers)
        self._sees_body = mode != _NONE
        self._usage = UsageReader(is_event_stream=is_event_stream)
        # Engines send the headers of a non-streamed HTTP response once its body is generated; not so gRPC.
        is_streamed = is_event_stream or content_type.startswith("application/grpc")
        if message.end_of_stream or not (self._sees_body or is_streamed):
            self._complete()
        return headers

    def body(self, message: pb.HttpBody, mode: int) -> Iterable[pb.ProcessingResponse]:
        """Process a chunk of the response body and return the messages that pass it on."""
        data, is_last = message.body, message.end_of_stream
        if self._awaits_first_token and (sent := self.pending) is not None:
            self._awaits_first_token = False
            self._lifecycle.first_token(
                sent.request_id, RESPONSE, time.monotonic(), pod=sent.primary.pod, dispatched_s=sent.decided_s
            )
        if self._usage is not None:
            self._usage.feed(data)
        if is_last:
            self._complete()
        if mode != _FULL_DUPLEX_STREAMED:
            return (self._in_place(data, is_last),)
        if self.buffered is not None:
            self.buffered += data
            if not is_last and len(self.buffered) <= self._buffered_bytes_max:
                return ()
            data, self.buffered = bytes(self.buffered), None
        return self._passed_on(data, end_of_stream=is_last)

    def trailers(self, message: pb.HttpTrailers) -> Iterator[pb.ProcessingResponse]:
        """Process the trailers, which end the response; yield the buffered body and the trailers."""
        if _has_grpc_failed(trailers := header_values(message.trailers)):
            self._event = FAILED
            self._is_fault = _is_fault(trailers)
        self._complete()
        if self.buffered:
            data, self.buffered = bytes(self.buffered), None
            yield from self._passed_on(data, end_of_stream=False)
        yield pb.ProcessingResponse(response_trailers=pb.TrailersResponse())

    def abort(self) -> None:
        """Report the request as failed, unless its end has been reported."""
        self._is_fault = False  # unknown: Envoy also ends the stream if the client disconnects
        self._report_end(FAILED)

    def close(self) -> None:
        """Process the end of the stream: a response that is incomplete by now has failed."""
        # Without the body Envoy closes the stream after the headers; the access log reports the end then.
        if self._sees_body:
            self.abort()

    def _passed_on(self, data: bytes, *, end_of_stream: bool) -> Iterator[pb.ProcessingResponse]:
        data = restore_client_model(data, *self.models)
        for answer in streamed_body_responses("response_body", data, end_of_stream=end_of_stream):
            if answer.response_body.response.body_mutation.streamed_response.end_of_stream:
                self._add_usage(answer)
            yield answer

    def _in_place(self, data: bytes, is_last: bool) -> pb.ProcessingResponse:
        """Return the answer to a body chunk that Envoy buffers; it holds the chunk only if changed."""
        answer = pb.ProcessingResponse(response_body=pb.BodyResponse())
        restored = restore_client_model(data, *self.models)
        if restored is not data:
            common = answer.response_body.response
            common.body_mutation.body = restored
            set_headers(common.header_mutation, {"content-length": str(len(restored))})
        if is_last:
            self._add_usage(answer)
        return answer

    def _add_usage(self, answer: pb.ProcessingResponse) -> None:
        if self._reporter is None or self._usage is None or (usage := self._usage.usage_json) is None:
            return
        if attributes := self._reporter.report(usage):
            answer.dynamic_metadata.update(attributes)

    def _complete(self) -> None:
        """Process the end of a complete response."""
        if self._usage is not None:
            self._usage.end()
        self._report_end(self._event)

    def _report_end(self, event: str) -> None:
        sent, self.pending, usage = self.pending, None, self._usage
        if sent is None:
            return
        pod = sent.primary.pod
        if event == DONE and usage is not None and usage.state_id is not None:
            self._lifecycle.keeps_state(usage.state_id, pod)
        report = RequestReport(
            sent.request_id,
            event,
            RESPONSE,
            pod,
            cached_tokens=usage.cached_tokens if usage is not None else None,
            output_tokens=usage.output_tokens if usage is not None else None,
            is_fault=self._is_fault,
        )
        self._lifecycle.ended(report, time.monotonic(), dispatched_s=sent.decided_s)


def _has_grpc_failed(headers: Mapping[str, str]) -> bool:
    """Return whether gRPC reports an error, in the trailers or, without a body, in the headers."""
    return headers.get("grpc-status", "0") != "0"


def _is_fault(headers: Mapping[str, str]) -> bool:
    """Return whether the headers or trailers report a failure of the pod, not of its gateway or client."""
    status = headers.get(":status", "200")
    if status >= "500":
        return status not in _NO_FAULTS and "x-envoy-overloaded" not in headers
    return headers.get("grpc-status", "0") in _GRPC_FAULTS


class UsageReader:
    """Incremental reader of a response's token usage, from JSON or server-sent events.

    Understands OpenAI's APIs, Anthropic's messages and SGLang's /generate, which report usage under different
    names. Buffers one JSON body or one event line of at most 1 MiB; longer ones are skipped.
    """

    def __init__(self, *, is_event_stream: bool) -> None:
        self._is_event_stream = is_event_stream
        self._kept = b""
        self._too_long = False
        self.cached_tokens: int | None = None  # last prompt_tokens_details.cached_tokens or its equivalent
        self.output_tokens: int | None = None  # last completion_tokens or output_tokens
        self.state_id: str | None = None  # of the response, conversation or file that the pod keeps
        # Values of `usage` by name; each event of a response may report a part of them.
        self._usage: dict[str, msgspec.Raw] = {}

    @property
    def usage_json(self) -> bytes | None:
        """JSON of all `usage` fields seen so far; None if there are none."""
        return msgspec.json.encode(self._usage) if self._usage else None

    def feed(self, chunk: bytes) -> None:
        if self._is_event_stream:
            text = self._kept + chunk if self._kept else chunk
            end = text.rfind(b"\n") + 1
            self._kept = text[end:]
            # Most chunks have no usage, so they are not split into lines.
            if end and (b'"usage"' in text or b'"meta_info"' in text):
                for line in text[:end].split(b"\n"):
                    self._event_line(line)
        elif not self._too_long:
            self._kept += chunk
        if len(self._kept) > _KEPT_BYTES_MAX:
            self._kept, self._too_long = b"", True

    def end(self) -> None:
        if self._is_event_stream:
            self._event_line(self._kept)
        elif not self._too_long:
            self._answer(self._kept)
        self._kept = b""

    def _event_line(self, line: bytes) -> None:
        if line.startswith(b"data:") and (b'"usage"' in line or b'"meta_info"' in line):
            self._answer(line[5:])

    def _answer(self, text: bytes) -> None:
        try:
            answer = _ANSWER.decode(text)
            if bytes((kept := answer.response or answer).object) in _KEPT_OBJECTS and kept.id:
                self.state_id = _ID.decode(kept.id)
            raw = answer.raw_usage()
            usage = _USAGE.decode(raw) if raw else None
            if usage is None:
                return
            if len(raw) <= _USAGE_BYTES_MAX:
                self._usage |= _RAW_FIELDS.decode(raw)
                self._usage = dict(islice(self._usage.items(), _USAGE_FIELDS_MAX))
        except (ValueError, RecursionError):
            return
        details = usage.prompt_tokens_details or usage.input_tokens_details
        cached_tokens = details.cached_tokens if details is not None else usage.cached()
        if cached_tokens is not None:
            self.cached_tokens = cached_tokens
        if (tokens := usage.output_tokens or usage.completion_tokens) is not None:
            self.output_tokens = tokens


_MISSING = msgspec.Raw()
# `object` of answers that later requests may name by their id.
_KEPT_OBJECTS = frozenset({b'"response"', b'"conversation"', b'"file"'})

_Tokens = Annotated[int, msgspec.Meta(ge=0, le=_TOKENS_MAX)]


class _Details(msgspec.Struct):
    cached_tokens: _Tokens | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    # Field names of Anthropic and SGLang.
    cache_read_input_tokens: _Tokens | None = None
    cached_tokens: _Tokens | None = None
    completion_tokens: _Tokens | None = None
    output_tokens: _Tokens | None = None

    def cached(self) -> int | None:
        return self.cached_tokens if self.cache_read_input_tokens is None else self.cache_read_input_tokens


class _Nested(msgspec.Struct):
    id: msgspec.Raw = _MISSING
    object: msgspec.Raw = _MISSING
    usage: msgspec.Raw = _MISSING


class _Answer(_Nested):
    # The Responses API reports usage in its last event.
    response: _Nested | None = None
    # Anthropic's first event reports the usage of the prompt, a later one that of the output.
    message: _Nested | None = None
    meta_info: msgspec.Raw = _MISSING

    def raw_usage(self) -> bytes:
        """Return the JSON of the usage field, nested or not; empty if there is none."""
        nested = self.response or self.message
        return bytes(self.usage) or (bytes(nested.usage) if nested else b"") or bytes(self.meta_info)


_ANSWER, _ID = msgspec.json.Decoder(_Answer), msgspec.json.Decoder(str)
_USAGE, _RAW_FIELDS = msgspec.json.Decoder(_Usage | None), msgspec.json.Decoder(dict[str, msgspec.Raw])


def restore_client_model(body: bytes, target: str, client: str) -> bytes:
    """Replace the target model's name by the client's in a response or a chunk of one.

    Replaces every `"model":"TARGET"`; where there is none, every `"model": "TARGET"` (with a space).
    """
    if not target or not client or target == client:
        return body
    before, after = msgspec.json.encode(target), msgspec.json.encode(client)
    for key in (b'"model":', b'"model": '):
        if key + before in body:
            return body.replace(key + before, key + after)
    return body
