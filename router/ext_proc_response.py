"""The response half of an ext_proc stream: messages in, echoes out, and what they tell of the outcome.

Holds no chunk back. Messages are read before they are answered: after the last answer Envoy may reset the
stream.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping

from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from router.decision import Decision
from router.ext_proc_bytes import RESPONSE_BODY, Answer, ResponseChunk, streamed_bytes
from router.ext_proc_messages import BodyMode, header_values, response_headers_answer
from router.outcomes import RESPONSE, Outcomes
from router.response_usage import UsageReader

# Every chunk would look it up.
_FULL_DUPLEX_STREAMED, _NONE = BodyMode.FULL_DUPLEX_STREAMED, BodyMode.NONE


class ResponsePhase:
    """One response.

    Attributes:
        request_id: The request that was picked for, as long as it is not over; None before and after, and
            for one that is no work.
    """

    def __init__(self, outcomes: Outcomes) -> None:
        self._outcomes = outcomes
        self.request_id: str | None = None
        self._pod: str | None = None
        self._sent_s: float | None = None
        self._usage: UsageReader | None = None
        self._failed, self._refused = True, False
        self._sees_body = True
        self._awaits_first_token = False

    def of(self, decision: Decision) -> None:
        """The response is to this request."""
        # Of what the ledger does not have there is nothing to tell; it may have another request of that id.
        if decision.is_charged:
            self.request_id, self._pod = decision.request_id, decision.primary.pod
            self._sent_s = decision.decided_s

    def headers(self, message: pb.HttpHeaders, mode: int) -> Iterator[pb.ProcessingResponse]:
        """Answers the response's headers; `mode`: how the body will come here."""
        self.note_headers(message, mode)
        yield response_headers_answer()

    def body(self, message: pb.HttpBody | ResponseChunk, mode: int) -> Iterable[Answer]:
        """Echoes a chunk of the response's body."""
        self.note_body(message)
        if mode != _FULL_DUPLEX_STREAMED:
            return (pb.ProcessingResponse(response_body=pb.BodyResponse()),)
        if isinstance(message, ResponseChunk):
            return (message.echo,)
        return streamed_bytes(RESPONSE_BODY, message.body, end_of_stream=message.end_of_stream)

    def trailers(self, message: pb.HttpTrailers) -> Iterator[pb.ProcessingResponse]:
        """Answers the response's trailers, which end it."""
        self.note_trailers(message)
        yield pb.ProcessingResponse(response_trailers=pb.TrailersResponse())

    def note_headers(self, message: pb.HttpHeaders, mode: int) -> dict[str, str]:
        """Reads the response's headers without answering them."""
        headers = header_values(message.headers)
        content_type = headers.get("content-type", "")
        is_event_stream = "text/event-stream" in content_type
        # Of an answer in one piece, the first byte is no earlier than the last token.
        self._awaits_first_token = is_event_stream
        status = headers.get(":status", "200")
        self._failed, self._refused = status >= "500" or _has_grpc_failed(headers), "400" <= status < "500"
        self._sees_body = mode != _NONE
        self._usage = UsageReader(is_event_stream=is_event_stream)
        # An answer in one piece is made when its headers come, whoever sees the rest of it; gRPC's are not.
        comes_in_pieces = is_event_stream or content_type.startswith("application/grpc")
        if message.end_of_stream or not (self._sees_body or comes_in_pieces):
            self.note_end()
        return headers

    def note_body(self, message: pb.HttpBody | ResponseChunk) -> None:
        """Reads a chunk of the response's body without answering it."""
        if self._awaits_first_token and self.request_id is not None:
            self._awaits_first_token = False
            self._outcomes.first_token(
                self.request_id, RESPONSE, time.monotonic(), pod=self._pod, sent_s=self._sent_s
            )
        if self._usage is not None:
            self._usage.feed(message.body)
        if message.end_of_stream:
            self.note_end()

    def note_trailers(self, message: pb.HttpTrailers) -> None:
        """Reads the response's trailers, which end it, without answering them."""
        if _has_grpc_failed(header_values(message.trailers)):
            self._failed = True
        self.note_end()

    @property
    def usage_json(self) -> bytes | None:
        """The usage that the response tells, as it is written there; None: none as yet."""
        return self._usage.usage_json if self._usage is not None else None

    def cut(self) -> None:
        """The response is cut off, if it is not over."""
        self._ended(failed=True)

    def close(self) -> None:
        """The stream is over; unless the response was, it was cut off, or its end is for others to tell."""
        # Envoy closes the stream behind the headers where it keeps the body to itself.
        if self._sees_body:
            self.cut()

    def note_end(self) -> None:
        """The response is complete."""
        if self._usage is not None:
            self._usage.end()
        self._ended(failed=self._failed)

    def _ended(self, *, failed: bool) -> None:
        request_id, self.request_id = self.request_id, None
        if request_id is None:
            return
        self._outcomes.ended(
            request_id,
            RESPONSE,
            time.monotonic(),
            pod=self._pod,
            sent_s=self._sent_s,
            failed=failed,
            refused=self._refused,
            cached_tokens=self._usage.cached_tokens if self._usage is not None else None,
        )


def _has_grpc_failed(headers: Mapping[str, str]) -> bool:
    """gRPC answers 200 whatever happened, and tells in its trailers, or in headers without a body."""
    return headers.get("grpc-status", "0") != "0"
