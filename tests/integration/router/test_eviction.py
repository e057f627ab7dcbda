"""Flow control with eviction: a saturated pool, a batch request in flight, another one queued."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as pb_grpc

from router.errors import ConfigError
from tests.support.router.doors import Stream, set_headers, wait_until
from tests.support.router.hermetic import HERMETIC, message, pod, scene, waiting
from tests.support.router.server import get

DESTINATION = "x-gateway-destination-endpoint"
CONFIG: dict[str, Any] = HERMETIC["configs"]["flow-control-concurrency-1"]
BATCH = {
    "apiVersion": "llm-d.ai/v1alpha2",
    "kind": "InferenceObjective",
    "metadata": {"name": "batch"},
    "spec": {"priority": -1},
}


def evicting(**flow: Any) -> dict[str, Any]:
    """Run a router with one pod of capacity one, where requests below priority 0 may be evicted."""
    config = {**CONFIG, "flowControl": {**CONFIG["flowControl"], "enableEviction": True, **flow}}
    return {"config": config, "pods": [pod(0)], "resources": [BATCH]}


def asked(name: str, **headers: str) -> list[pb.ProcessingRequest]:
    """Return a request's messages."""
    named = {"x-request-id": name, **{key.replace("_", "-"): value for key, value in headers.items()}}
    return [
        message({"type": "request_headers", "headers": named, "end_of_stream": False}),
        message({"type": "request_body", "end_of_stream": True, "body": '{"model":"m","prompt":"p"}'}),
    ]


def test_a_batch_request_makes_room_for_an_interactive_one(tmp_path: Path) -> None:
    """The batch request in flight gets 429 with the protocol's reason; the queued one gets its pod."""
    with (
        scene(evicting(), tmp_path) as played,
        grpc.insecure_channel(f"127.0.0.1:{played.router.ports['grpc']}") as channel,
    ):
        batch, chat = (Stream(pb_grpc.ExternalProcessorStub(channel)) for _ in range(2))
        batch.send(*asked("batch-1", x_llm_d_inference_objective="batch"))
        assert set_headers(batch.receive())[DESTINATION] == played.pods[0].address
        assert batch.receive().WhichOneof("response") == "request_body"
        chat.send(*asked("chat-1"))
        evicted = batch.receive().immediate_response
        assert (evicted.status.code, evicted.body) == (429, b"request evicted by flow control")
        assert {one.header.key: one.header.raw_value for one in evicted.headers.set_headers} == {
            "x-llm-d-request-dropped-reason": b"evicted"
        }
        assert set_headers(chat.receive())[DESTINATION] == played.pods[0].address
        assert batch.rest() == []
        chat.rest()
        wait_until(lambda: len(played.router.lifecycle.ledger) == 0, "the ends")
        counted = b'error_code="RateLimitError"'
        wait_until(lambda: counted in get(played.router, "/metrics")[1], "the refusal's count")


def test_only_priorities_below_zero_are_evicted(tmp_path: Path) -> None:
    """A request of priority 0 in flight is not evicted: the next one waits for its end."""
    with (
        scene(evicting(), tmp_path) as played,
        grpc.insecure_channel(f"127.0.0.1:{played.router.ports['grpc']}") as channel,
    ):
        first, second = (Stream(pb_grpc.ExternalProcessorStub(channel)) for _ in range(2))
        first.send(*asked("first"))
        assert set_headers(first.receive())[DESTINATION] == played.pods[0].address
        first.receive()
        second.send(*asked("second"))
        wait_until(lambda: waiting(played) == 1, "the queue")
        first.send(
            message({"type": "response_headers", "headers": {"content-type": "application/json"}}),
            message({"type": "response_body", "end_of_stream": True, "body": "{}"}),
        )
        kinds = [first.receive().WhichOneof("response") for _ in range(2)]
        assert kinds == ["response_headers", "response_body"]
        assert set_headers(second.receive())[DESTINATION] == played.pods[0].address
        first.rest()
        second.rest()


def test_a_batch_request_that_is_not_evicted_is_served_in_full(tmp_path: Path) -> None:
    """A batch request that is not evicted is served in full."""
    with (
        scene(evicting(), tmp_path) as played,
        grpc.insecure_channel(f"127.0.0.1:{played.router.ports['grpc']}") as channel,
    ):
        batch = Stream(pb_grpc.ExternalProcessorStub(channel))
        batch.send(
            *asked("batch-1", x_llm_d_inference_objective="batch"),
            message({"type": "response_headers", "headers": {"content-type": "text/event-stream"}}),
            *(message({"type": "response_body", "body": f"data: {n}\n\n"}) for n in range(20)),
            message({"type": "response_body", "end_of_stream": True, "body": "data: [DONE]\n\n"}),
        )
        answers = batch.rest()
        assert [one.WhichOneof("response") for one in answers[:3]] == [
            "request_headers",
            "request_body",
            "response_headers",
        ]
        chunks = [one.response_body.response.body_mutation.streamed_response for one in answers[3:]]
        assert b"".join(chunk.body for chunk in chunks).startswith(b"data: 0\n\ndata: 1\n\n")
        assert [chunk.end_of_stream for chunk in chunks] == [False] * 20 + [True]


def test_eviction_needs_full_responses(tmp_path: Path) -> None:
    """Eviction without full responses is rejected at start, with the flags that it needs."""
    with (
        pytest.raises(ConfigError, match=r"enableEviction: needs --responses full"),
        scene(evicting(), tmp_path, "--responses", "skip"),
    ):
        pass
