"""The response half of an ext_proc stream: messages in, echoes out, and what they tell of the outcome.

Holds no chunk back. Messages are read before they are answered: after the last answer Envoy may reset the
stream.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from router.ext_proc_bytes import RESPONSE_BODY, Answer, ResponseChunk, streamed_bytes
from router.ext_proc_messages import BodyMode, header_values, response_headers_answer
from router.outcomes import RESPONSE, Outcomes
from router.response_usage import UsageReader

# Every chunk would look it up.
_FULL_DUPLEX_STREAMED = BodyMode.FULL_DUPLEX_STREAMED


class ResponsePhase:
    """One response.

    Attributes:
        request_id: The request that was picked for, as long as it is not over; None before and after.
        pod: The picked pod.
        explained: What the response says of the decision; None: nothing.
    """

    def __init__(self, outcomes: Outcomes) -> None:
        self._outcomes = outcomes
        self.request_id: str | None = None
        self.pod: str | None = None
        self.explained: str | None = None
        self._usage: UsageReader | None = None
        self._failed = True
        self._awaits_first_token = False

    def headers(self, message: pb.HttpHeaders) -> Iterator[pb.ProcessingResponse]:
        """Answers the response's headers."""
        self.note_headers(message)
        yield response_headers_answer(self.explained)

    def body(self, message: pb.HttpBody | ResponseChunk, mode: int) -> Iterable[Answer]:
        """Echoes a chunk of the response's body."""
        self.note_body(message)
        if mode != _FULL_DUPLEX_STREAMED:
            return (pb.ProcessingResponse(response_body=pb.BodyResponse()),)
        if isinstance(message, ResponseChunk):
            return (message.echo,)
        return streamed_bytes(RESPONSE_BODY, message.body, end_of_stream=message.end_of_stream)

    def trailers(self) -> Iterator[pb.ProcessingResponse]:
        """Answers the response's trailers, which end it."""
        self.note_end()
        yield pb.ProcessingResponse(response_trailers=pb.TrailersResponse())

    def note_headers(self, message: pb.HttpHeaders) -> dict[str, str]:
        """Reads the response's headers without answering them."""
        headers = header_values(message)
        is_event_stream = "text/event-stream" in headers.get("content-type", "")
        # Of an answer in one piece, the first byte is no earlier than the last token.
        self._awaits_first_token = is_event_stream
        self._failed = headers.get(":status", "200") >= "500"
        self._usage = UsageReader(is_event_stream=is_event_stream)
        if message.end_of_stream:
            self.note_end()
        return headers

    def note_body(self, message: pb.HttpBody | ResponseChunk) -> None:
        """Reads a chunk of the response's body without answering it."""
        if self._awaits_first_token and self.request_id is not None:
            self._awaits_first_token = False
            self._outcomes.first_token(self.request_id, RESPONSE, time.monotonic(), pod=self.pod)
        if self._usage is not None:
            self._usage.feed(message.body)
        if message.end_of_stream:
            self.note_end()

    @property
    def usage_json(self) -> bytes | None:
        """The usage that the response tells, as it is written there; None: none as yet."""
        return self._usage.usage_json if self._usage is not None else None

    def cut(self) -> None:
        """The stream is over; unless the response was, it was cut."""
        self._ended(failed=True)

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
            pod=self.pod,
            failed=failed,
            cached_tokens=self._usage.cached_tokens if self._usage is not None else None,
        )
