"""Clients that cancel while queued in flow control free their slots, for each gRPC service."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from envoy.service.auth.v3 import external_auth_pb2, external_auth_pb2_grpc
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc

from router._pb import endpoint_picker_pb2
from tests.support.router.doors import TIMEOUT_S, Stream, body, headers, wait_until
from tests.support.router.hermetic import Scene, pod, scene, waiting
from tests.support.router.server import get
from tests.support.stubs import picker_stub

_CONFIG = {"apiVersion": "llm-d.ai/v1alpha1", "kind": "EndpointPickerConfig", "featureGates": ["flowControl"]}
# The pod reports that it is saturated.
_CASE: dict[str, Any] = {"config": _CONFIG, "pods": [pod(0, waiting=100)]}
_BODY = b'{"model": "m", "prompt": "p"}'
_PATH = "/v1/completions"

# Requests a pod and returns a function that cancels the request.
Ask = Callable[[Scene, grpc.Channel], Callable[[], object]]


def by_pick_endpoint(_played: Scene, channel: grpc.Channel) -> Callable[[], object]:
    """Request a pod by PickEndpoint."""
    stub = picker_stub(channel)
    request = endpoint_picker_pb2.PickEndpointRequest(model="m", prompt="p")
    cancel: Callable[[], object] = stub.PickEndpoint.future(request, timeout=TIMEOUT_S).cancel
    return cancel


def by_check(_played: Scene, channel: grpc.Channel) -> Callable[[], object]:
    """Request a pod by ext_authz."""
    stub: Any = external_auth_pb2_grpc.AuthorizationStub(channel)
    message = external_auth_pb2.CheckRequest()
    http = message.attributes.request.http
    http.method, http.path, http.raw_body = "POST", _PATH, _BODY
    cancel: Callable[[], object] = stub.Check.future(message, timeout=TIMEOUT_S).cancel
    return cancel


def by_ext_proc(_played: Scene, channel: grpc.Channel) -> Callable[[], object]:
    """Request a pod by ext_proc."""
    stream = Stream(external_processor_pb2_grpc.ExternalProcessorStub(channel))
    stream.send(headers(path=_PATH), body(_BODY))
    return stream.cancel


@pytest.mark.parametrize(
    ("ask", "compat"),
    [
        (by_pick_endpoint, "answers"),
        (by_check, "answers"),
        (by_ext_proc, "off"),
        (by_ext_proc, "answers"),
    ],
)
def test_a_cancelled_queued_request_frees_its_slot(ask: Ask, compat: str, tmp_path: Path) -> None:
    """A cancelled request leaves its queue at once and is never charged to a pod."""
    flags = ("--compat", compat)
    cancelled = 'request_queue_duration_seconds_count{outcome="cancelled",priority="0"} 3.0'
    with (
        scene(_CASE, tmp_path, *flags) as played,
        grpc.insecure_channel(f"127.0.0.1:{played.router.ports['grpc']}") as channel,
    ):
        leave = [ask(played, channel) for _ in range(3)]
        wait_until(lambda: waiting(played) == 3, "the queue")
        for one in leave:
            one()
        wait_until(lambda: waiting(played) == 0, "the end of their waiting")
        wait_until(lambda: cancelled in get(played.router, "/metrics")[1].decode(), "their reason")
        assert len(played.router.lifecycle.ledger) == 0
