"""ext_proc's hand-written answers: the same as protobuf would write them, field by field."""

from __future__ import annotations

import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from hypothesis import given
from hypothesis import strategies as st

from router.ext_proc_bytes import REQUEST_BODY, RESPONSE_BODY, routed_bytes, streamed_bytes
from router.ext_proc_messages import CHUNK_BYTES_MAX, request_headers_answer, streamed


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
