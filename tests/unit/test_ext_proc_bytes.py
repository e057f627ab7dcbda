"""ext_proc's hand-written answers: the same as protobuf would write them, field by field."""

from __future__ import annotations

import pytest
from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from router.ext_proc_bytes import (
    REQUEST_BODY,
    RESPONSE_BODY,
    ResponseChunk,
    read_message,
    routed_bytes,
    streamed_bytes,
)
from router.ext_proc_messages import CHUNK_BYTES_MAX, request_headers_answer, streamed

_bodies = st.integers(0, 20_000).map(bytes) | st.binary(max_size=300)
_chunks = st.builds(
    pb.ProcessingRequest,
    response_body=st.builds(
        pb.HttpBody,
        body=_bodies,
        end_of_stream=st.booleans(),
        end_of_stream_without_message=st.sampled_from([False] * 4 + [True]),
    ),
    metadata_context=st.sampled_from(
        [None, base_pb2.Metadata(), base_pb2.Metadata(filter_metadata={"a": {}})]
    ),
)
_changes = st.lists(st.tuples(st.integers(0, 30), st.binary(max_size=3), st.booleans()), max_size=3)


@given(st.binary(max_size=300), st.booleans())
def test_chunks_are_protobufs_own(body: bytes, ends: bool) -> None:
    """A chunk of either direction is what the messages would say, down to the bytes of the body."""
    expected = next(streamed(body, end_of_stream=ends))
    (request,) = streamed_bytes(REQUEST_BODY, body, end_of_stream=ends)
    (response,) = streamed_bytes(RESPONSE_BODY, body, end_of_stream=ends)
    assert pb.ProcessingResponse.FromString(request) == pb.ProcessingResponse(request_body=expected)
    assert pb.ProcessingResponse.FromString(response) == pb.ProcessingResponse(response_body=expected)


@pytest.mark.parametrize("size", [CHUNK_BYTES_MAX - 1, CHUNK_BYTES_MAX, CHUNK_BYTES_MAX + 1, 400_000])
def test_long_bodies_are_cut_alike(size: int) -> None:
    """Pieces and their ends are those of the messages."""
    body = bytes(range(256)) * (size // 256 + 1)
    got = [
        pb.ProcessingResponse.FromString(one)
        for one in streamed_bytes(REQUEST_BODY, body[:size], end_of_stream=True)
    ]
    expected = streamed(body[:size], end_of_stream=True)
    assert got == [pb.ProcessingResponse(request_body=one) for one in expected]


@pytest.mark.parametrize("made_request_id", [None, "made"])
@pytest.mark.parametrize("body_bytes", [0, 1, 400_000])
def test_two_messages_in_a_row_are_read_as_one(made_request_id: str | None, body_bytes: int) -> None:
    """The body's length joins the routing result that was written long before."""
    removed = ("x-llm-d-inference-objective",)
    set_headers = {} if made_request_id is None else {"x-request-id": made_request_id}
    if body_bytes:
        set_headers["content-length"] = str(body_bytes)
    got = pb.ProcessingResponse.FromString(routed_bytes("10.0.0.1:80", made_request_id, removed, body_bytes))
    assert got == request_headers_answer("10.0.0.1:80", set_headers, removed)


@given(_bodies.filter(bool), st.booleans(), st.booleans())
@example(bytes(CHUNK_BYTES_MAX), True, True)
def test_a_plain_chunk_is_read_and_echoed_without_protobuf(body: bytes, ends: bool, knows: bool) -> None:
    """A chunk as Envoy sends it is read at once, and its echo is what protobuf would write."""
    sent = pb.ProcessingRequest(response_body=pb.HttpBody(body=body, end_of_stream=ends))
    if knows:
        sent.metadata_context.SetInParent()
    got = read_message(sent.SerializeToString())
    assert isinstance(got, ResponseChunk)
    assert (got.body, got.end_of_stream) == (body, ends)
    assert [got.echo] == list(streamed_bytes(RESPONSE_BODY, body, end_of_stream=ends))


@given(_chunks, _changes)
@example(pb.ProcessingRequest(response_body=pb.HttpBody(body=bytes(CHUNK_BYTES_MAX + 1))), [])
def test_any_message_is_read_as_protobuf_reads_it(
    message: pb.ProcessingRequest, changes: list[tuple[int, bytes, bool]]
) -> None:
    """Whatever is done to a chunk, from either end, it is refused or means what it means to protobuf."""
    data = message.SerializeToString()
    for place, change, is_front in changes:
        at = min(place, len(data)) if is_front else max(0, len(data) - place)
        data = data[:at] + change + data[at + len(change) :]
    try:
        expected = pb.ProcessingRequest.FromString(data)
    except DecodeError:
        with pytest.raises(DecodeError):
            read_message(data)
        return
    got = read_message(data)
    if isinstance(got, pb.ProcessingRequest):
        assert got == expected
        return
    assert expected.WhichOneof("request") == "response_body"
    body = expected.response_body
    assert (got.body, got.end_of_stream) == (body.body, body.end_of_stream)
    assert len(got.body) <= CHUNK_BYTES_MAX
    echoed = pb.ProcessingResponse.FromString(got.echo).response_body.response.body_mutation.streamed_response
    assert echoed.SerializeToString() == body.SerializeToString()
