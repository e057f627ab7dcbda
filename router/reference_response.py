"""The response half of an ext_proc stream in the reference's form: messages in, answers out.

Events are echoed at once, chunk by chunk; any other body is held, with a bound, until it is whole, so that
the model's name can be restored wherever it stands.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from router.attribute_reporter import AttributeReporter
from router.ext_proc_bytes import Answer, ResponseChunk
from router.ext_proc_messages import BodyMode, metadata, response_headers_answer, streamed
from router.ext_proc_response import ResponsePhase
from router.reference_messages import kept_headers
from router.rewrite import restored_model

# Where the gateways' conformance tests look for it.
_SERVED_HEADER = "x-conformance-test-served-endpoint"


class ReferenceResponse:
    """One response.

    Args:
        phase: Takes note of what the response tells.
        reporter: None: nothing of it is reported.
        held_bytes_max: A longer body is echoed as it comes, unchanged from there on.

    Attributes:
        set_headers: For the response, from plugins.
        models: (the pod's, the client's) name of the model.
    """

    def __init__(self, phase: ResponsePhase, reporter: AttributeReporter | None, held_bytes_max: int) -> None:
        self._phase = phase
        self._reporter = reporter
        self._held_bytes_max = held_bytes_max
        self._held: bytearray | None = bytearray()
        self.set_headers: Mapping[str, str] = {}
        self.models = ("", "")

    def streams(self) -> None:
        """The client asked for a stream: chunks are echoed as they come, whatever the headers say."""
        self._held = None

    def headers(
        self, message: pb.HttpHeaders, mode: int, served: str | None = None
    ) -> Iterator[pb.ProcessingResponse]:
        """Answers the response's headers.

        Args:
            mode: How the body will come here.
            served: The endpoint to name as the one that answered; None: none is named.
        """
        headers = self._phase.note_headers(message, mode)
        if "text/event-stream" in headers.get("content-type", ""):
            self._held = None
        told = {} if served is None else {_SERVED_HEADER: served}
        yield response_headers_answer({**kept_headers(headers), **self.set_headers, **told})

    def body(self, message: pb.HttpBody | ResponseChunk, mode: int) -> Iterator[Answer]:
        """Answers a chunk of the response's body."""
        self._phase.note_body(message)
        if mode != BodyMode.FULL_DUPLEX_STREAMED:
            yield self._buffered(message)
            return
        data = message.body
        if self._held is not None:
            self._held += data
            if not message.end_of_stream and len(self._held) <= self._held_bytes_max:
                return
            data, self._held = bytes(self._held), None
        elif isinstance(message, ResponseChunk) and not message.end_of_stream:
            data = restored_model(message.body, *self.models)
            if data is message.body:
                yield message.echo
                return
        yield from self._echo(data, end_of_stream=message.end_of_stream)

    def trailers(self, message: pb.HttpTrailers) -> Iterator[pb.ProcessingResponse]:
        """Answers the response's trailers, after what was held."""
        self._phase.note_trailers(message)
        if self._held:
            data, self._held = bytes(self._held), None
            yield from self._echo(data, end_of_stream=False)
        yield pb.ProcessingResponse(response_trailers=pb.TrailersResponse())

    def _echo(self, data: bytes, *, end_of_stream: bool) -> Iterator[pb.ProcessingResponse]:
        data = restored_model(data, *self.models)
        for answer in streamed(data, end_of_stream=end_of_stream):
            response = pb.ProcessingResponse(response_body=answer)
            if answer.response.body_mutation.streamed_response.end_of_stream:
                self._report(response)
            yield response

    def _buffered(self, message: pb.HttpBody | ResponseChunk) -> pb.ProcessingResponse:
        response = pb.ProcessingResponse(response_body=pb.BodyResponse())
        data = message.body
        restored = restored_model(data, *self.models)
        if restored is not data:
            common = response.response_body.response
            common.body_mutation.body = restored
            option = common.header_mutation.set_headers.add()
            option.header.key, option.header.raw_value = "content-length", str(len(restored)).encode()
        if message.end_of_stream:
            self._report(response)
        return response

    def _report(self, response: pb.ProcessingResponse) -> None:
        if self._reporter is None or (usage := self._phase.usage_json) is None:
            return
        if told := self._reporter.report(usage):
            response.dynamic_metadata.CopyFrom(metadata(told))
