"""Tenant salts in each service: which requests get one, and which are rejected because they cannot."""

from __future__ import annotations

import json

import grpc
import pytest

from router.doors.boundary import SALT_FIELDS, BodyGuard, TenantSalt
from router.doors.ext_proc_dialects import BodyMode, NativeDialect
from tests.support.router.bench import TINY, Bench, ready_pod
from tests.support.router.doors import body, headers, serving, set_headers, streamed_bytes
from tests.wire.router.test_check import check
from tests.wire.router.test_check import request as check_request
from tests.wire.router.test_pick_service import pick

SALT = TenantSalt("x-tenant", b"0123456789abcdef")
BODY = json.dumps({"model": TINY, "prompt": "hello", "cache_salt": "theirs"}).encode()
DESTINATION = "x-gateway-destination-endpoint"


def dialect(bench: Bench) -> NativeDialect:
    """Return the native dialect with salts, as the router builds it."""
    guard = BodyGuard(SALT_FIELDS, lambda: True)
    return NativeDialect(router=bench.router, guard=guard, metrics=bench.metrics, salt=SALT)


def test_ext_proc_sets_one_salt_per_tenant() -> None:
    """Equal tenants get equal salts, others get others, in both body modes and with duplicate fields."""
    bench = Bench().with_pods(ready_pod("10.0.0.1:8000"))
    salts = []
    told = BODY[:-1] + b', "cache_salt": "again", "extra_key": "x"}'
    with serving(bench, dialect=dialect(bench)) as served:
        for tenant in ("a", "a", "b"):
            got = served.exchange(headers(path="/v1/completions", x_tenant=tenant), body(told))
            sent, _ = streamed_bytes(got[1:])
            assert set_headers(got[0])["content-length"] == str(len(sent))
            assert sent.count(b"cache_salt") == 1
            assert b"extra_key" not in sent
            salts.append(json.loads(sent)["cache_salt"])
        mode = (BodyMode.BUFFERED, BodyMode.NONE)
        got = served.exchange(headers(path="/v1/completions", x_tenant="a", config=mode), body(BODY))
        salts.append(json.loads(got[1].request_body.response.body_mutation.body)["cache_salt"])
    assert salts[0] == salts[1] == salts[3] != salts[2]
    assert "theirs" not in salts


@pytest.mark.parametrize(
    ("path", "told", "tenant", "status"),
    [
        ("/v1/completions", BODY, "", 400),
        ("/v1/completions", BODY, "\udcff", 400),
        ("/v1/completions", BODY, "t" * 1025, 431),
        ("/v1/completions", BODY, "t" * 1024, 0),
        ("/v1/messages", BODY, "a", 400),
        ("/v1/embeddings", BODY, "a", 400),
        ("/v1/audio/transcriptions", b"--b", "a", 400),
        ("/v1/completions?x=/render", BODY, "", 400),
        ("/v1/completions#/render", BODY, "a", 400),
        ("/v1/completions/render?x", BODY, "", 0),
        ("/tokenize", BODY, "", 0),
    ],
)
def test_requests_that_cannot_be_salted_are_rejected(
    path: str, told: bytes, tenant: str, status: int
) -> None:
    """A missing or bad header, or an API without a salt, is an error."""
    bench = Bench().with_pods(ready_pod("10.0.0.1:8000"))
    with serving(bench, dialect=dialect(bench)) as served:
        message = headers(path=path)
        message.request_headers.headers.headers.add(
            key="x-tenant", raw_value=tenant.encode("utf-8", "surrogateescape")
        )
        answer = served.exchange(message, body(told))[0]
        assert answer.immediate_response.status.code == status
        assert (DESTINATION in set_headers(answer)) is (status == 0)


def test_services_that_cannot_change_bodies_reject() -> None:
    """ext_proc without the whole body rejects bodies; requests without a body pass."""
    bench = Bench().with_pods(ready_pod("10.0.0.1:8000"))
    with serving(bench, dialect=dialect(bench), salt=SALT) as served:
        for mode in (BodyMode.NONE, BodyMode.STREAMED):
            told = headers(path="/v1/completions", x_tenant="a", config=(mode, BodyMode.NONE))
            assert served.exchange(told)[0].immediate_response.status.code == 400
        assert DESTINATION in set_headers(served.exchange(headers(path="/v1/models", end=True))[0])
        denied = check(served, check_request(BODY, x_tenant="a")).denied_response
        assert denied.status.code == 500
        assert "ext_proc" in denied.body
        with pytest.raises(grpc.RpcError, match="not PickEndpoint"):
            pick(served, model=TINY, prompt="hello")
