"""Why a pod was picked, in a response header, at the real doors."""

from __future__ import annotations

import json
from typing import Any

import pytest
from envoy.service.auth.v3 import external_auth_pb2 as check_pb
from envoy.service.auth.v3 import external_auth_pb2_grpc as check_grpc

from router.explain_header import EXPLAIN_HEADER
from router.ext_proc import ExtProcOptions
from tests.unit.router_support import TINY, Bench, long_text, ready_pod
from tests.wire.router_wire_support import (
    TIMEOUT_S,
    body,
    doors,
    headers,
    response_headers,
    set_headers,
)

pytestmark = pytest.mark.usefixtures("each_transport")

A = ready_pod("10.0.0.1:8000")
BODY = json.dumps({"model": TINY, "prompt": long_text(200)}).encode()


def test_a_response_may_carry_its_decision() -> None:
    """Switched on, Check has Envoy add the header to the response, and ext_proc adds it itself."""
    bench = Bench().with_pods(A)
    with doors(bench, ExtProcOptions(responses_full=True), explains=True) as served:
        message = check_pb.CheckRequest()
        http = message.attributes.request.http
        http.path, http.raw_body = "/v1/completions", BODY
        stub: Any = check_grpc.AuthorizationStub(served.channel)
        added = stub.Check(message, timeout=TIMEOUT_S).ok_response.response_headers_to_add
        values = {option.header.key: option.header.value for option in added}
        assert values[EXPLAIN_HEADER].startswith(f"pod={A.address}; cached=0/")
        *_, answer = served.exchange(
            headers(path="/v1/completions"), body(BODY), response_headers(status="200", end=True)
        )
        assert set_headers(answer)[EXPLAIN_HEADER].isascii()


def test_responses_carry_no_decision_unless_asked_for() -> None:
    """By default neither door says anything."""
    with doors(Bench().with_pods(A), ExtProcOptions(responses_full=True)) as served:
        *_, answer = served.exchange(
            headers(path="/v1/completions"), body(BODY), response_headers(status="200", end=True)
        )
        assert set_headers(answer) == {"x-went-into-resp-headers": "true"}
