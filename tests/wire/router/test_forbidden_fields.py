"""Body fields that only gateways may send: removed by ext_proc, rejected by ext_authz."""

from __future__ import annotations

import json

import grpc
import pytest

from router.doors.boundary import GATEWAY_ONLY_HEADERS, BodyGuard
from router.doors.ext_proc_dialects import BodyMode
from tests.support.router.bench import TINY, Bench, ready_pod
from tests.support.router.doors import (
    body,
    headers,
    serving,
    set_headers,
    streamed_bytes,
    wait_until,
)
from tests.wire.router.test_check import check
from tests.wire.router.test_check import request as check_request
from tests.wire.router.test_pick_service import pick

pytestmark = pytest.mark.usefixtures("each_transport")

A = ready_pod("10.0.0.1:8000")
PLAIN = {"model": TINY, "prompt": "hello", "vllm_xargs": {"session_id": "s"}}
BODY = json.dumps(PLAIN).encode()
HOSTILE = [
    rb'{"model": "%b", "prompt": "hello", "vllm_xargs": {"session_id": "s"}, ' % TINY.encode() + field + b"}"
    for field in (
        b'"kv_transfer_params": {"do_remote_prefill": true, "remote_block_ids": []}',
        rb'"ec_transfer\u005fparams": 1',
        b'"kv_hints": null, "kv_hints": [{"payload": {"source_control_endpoint": "tcp://10.0.0.9:1"}}]',
    )
]
NESTED = json.dumps({**PLAIN, "vllm_xargs": {"session_id": "s", "kv_transfer_params": "x"}}).encode()
FORM = b"--b\r\ncontent-disposition: form-data; name=vllm_xargs\r\n\r\n{}\r\n--b--"
PATHS = ["/v1/completions", "/v1/embeddings", "/inference/v1/generate"]
DESTINATION = "x-gateway-destination-endpoint"
DROPPED = "kvroute_router_dropped_messages_total"


def bench() -> Bench:
    """Return a bench with one ready pod."""
    return Bench().with_pods(A)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("told", [*HOSTILE, NESTED])
def test_ext_proc_removes_the_fields(told: bytes, path: str) -> None:
    """ext_proc removes a forbidden field, adapts content-length and counts the removal."""
    buffered = (BodyMode.BUFFERED, BodyMode.NONE)
    with serving(bench()) as served:
        got = served.exchange(headers(path=path), body(told[:9], end=False), body(told[9:]))
        sent, ends = streamed_bytes(got[1:])
        assert (json.loads(sent), ends) == (PLAIN, [True])
        assert set_headers(got[0])["content-length"] == str(len(sent))
        got = served.exchange(headers(path=path, config=buffered), body(told))
        sent = got[1].request_body.response.body_mutation.body
        assert json.loads(sent) == PLAIN
        assert set_headers(got[1])["content-length"] == str(len(sent))
        labels = {"door": "ext_proc", "reason": "forbidden_field"}
        wait_until(lambda: served.bench.sample(DROPPED, **labels) == 2, "both are counted")


@pytest.mark.parametrize("path", PATHS)
def test_ext_proc_passes_other_bodies_unchanged(path: str) -> None:
    """A body without a forbidden field is passed on byte for byte."""
    with serving(bench()) as served:
        got = served.exchange(headers(path=path), body(BODY))
        assert streamed_bytes(got[1:]) == (BODY, [True])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("told", [*HOSTILE, NESTED])
def test_ext_authz_refuses_the_fields(told: bytes, path: str) -> None:
    """ext_authz cannot change a body, so it rejects with a 400 that names the field."""
    with serving(bench()) as served:
        denied = check(served, check_request(told, path)).denied_response
        assert check(served, check_request(BODY, path)).status.code == 0
    error = json.loads(denied.body)["error"]
    assert (denied.status.code, error["code"], error["type"]) == (400, 400, "BadRequestError")
    assert error["param"].rpartition(".")[2] in ("kv_transfer_params", "ec_transfer_params", "kv_hints")
    assert error["param"] in error["message"]


@pytest.mark.parametrize("has_connector", [False, True])
def test_an_uncheckable_body_is_rejected_with_a_kv_connector(has_connector: bool) -> None:
    """Bodies that cannot be checked pass only where no engine has a KV connector."""
    guard = BodyGuard(has_connector=lambda: has_connector)
    path = "/v1/audio/transcriptions"
    expected = 400 if has_connector else 0
    with serving(bench(), guard=guard) as served:
        for message in (
            check_request(FORM, path),
            check_request(BODY, x_envoy_auth_partial_body="true"),
            check_request(b""),
        ):
            assert check(served, message).denied_response.status.code == expected
        for told in (
            (headers(path=path), body(FORM)),
            (headers(path=path, config=(BodyMode.NONE, BodyMode.NONE)),),
            (headers(path=path, config=(BodyMode.STREAMED, BodyMode.NONE)),),
        ):
            answer = served.exchange(*told)[0]
            assert answer.immediate_response.status.code == expected
            assert (DESTINATION in set_headers(answer)) is not has_connector
        assert DESTINATION in set_headers(served.exchange(headers(path="/v1/models", end=True))[0])


def test_pick_endpoint_accepts_only_template_options() -> None:
    """PickEndpoint has no body to check, and rejects options other than the chat template's."""
    message = json.dumps([{"role": "user", "content": "hi"}]).encode()
    with serving(bench()) as served, pytest.raises(grpc.RpcError) as raised:
        pick(
            served, model=TINY, chat={"messages_json": message, "options_json": b'{"kv_transfer_params":{}}'}
        )
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("name", GATEWAY_ONLY_HEADERS)
def test_headers_that_only_gateways_set_are_removed(name: str) -> None:
    """Routing, rank and transfer headers sent by a client are overwritten or removed by each service."""
    told = {name.replace("-", "_"): "10.0.0.9:1"}
    with serving(bench()) as served:
        answer = check(served, check_request(BODY, **told)).ok_response
        removed = [set(answer.headers_to_remove)]
        got = served.exchange(headers(path="/v1/completions", **told), body(BODY))
        removed.append(set(got[0].request_headers.response.header_mutation.remove_headers))
    if name in (DESTINATION, "x-envoy-auth-partial-body"):
        assert not any(name in one for one in removed)
        assert set_headers(got[0])[DESTINATION] == A.address
    else:
        assert all(name in one for one in removed)
