"""The doors in steps: what each shows of a request's steps to whoever serves several together."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from envoy.service.auth.v3 import external_auth_pb2

from router._pb import endpoint_picker_pb2 as pb
from router.check import CheckDoor
from router.ext_proc import ExtProcDoor, ExtProcOptions
from router.gateway_pick import GatewayPick
from router.h2.methods import Methods, SteppedHandler
from router.health import CHECK_SERVICE, PICK_SERVICE
from router.pick_service import PickDoor
from router.steps import GOES_ON, MAY_WAIT
from tests.unit.router_support import TINY, Bench, long_text, ready_pod
from tests.wire.router_wire_support import body, headers

_PATH = "/v1/completions"
# What was encoded once is remembered, and nobody waits for it.
_UNHEARD = count(7_000_000)
_CONTEXT: Any = SimpleNamespace(is_active=lambda: True)


def _handler(door: Any, path: str) -> SteppedHandler:
    methods: Any = Methods()
    door.add_to(methods)
    handler = methods.find(path)
    assert isinstance(handler, SteppedHandler)
    return handler


def _check(bench: Bench, picks: GatewayPick, prompt: str) -> Iterable[Any]:
    message = external_auth_pb2.CheckRequest()
    message.attributes.request.http.path = _PATH
    message.attributes.request.http.raw_body = _body(prompt)
    return _handler(CheckDoor(picks, bench.metrics), f"/{CHECK_SERVICE}/Check").steps(message, _CONTEXT)


def _pick_endpoint(bench: Bench, picks: GatewayPick, prompt: str) -> Iterable[Any]:
    handler = _handler(
        PickDoor(picks, bench.outcomes, bench.metrics, bench.pods), f"/{PICK_SERVICE}/PickEndpoint"
    )
    message = pb.PickEndpointRequest(model=TINY, prompt=prompt).SerializeToString()
    return handler.steps(handler.request_deserializer(message), _CONTEXT)


def _ext_proc(bench: Bench, picks: GatewayPick, prompt: str) -> Iterable[Any]:
    exchange = ExtProcDoor(picks, bench.outcomes, bench.metrics, ExtProcOptions()).exchange(_CONTEXT)
    assert not list(exchange.answers(headers(path=_PATH)))
    yield from exchange.answers(body(_body(prompt)))
    exchange.close()


def _body(prompt: str) -> bytes:
    return json.dumps({"model": TINY, "prompt": prompt}).encode()


@pytest.mark.parametrize("door", [_check, _pick_endpoint, _ext_proc])
def test_a_door_hands_on_each_step_and_each_announced_wait(
    door: Callable[[Bench, GatewayPick, str], Iterable[Any]],
) -> None:
    """Read, tokenized, picked: after each others may have their turn, and a long text's wait is told."""
    bench = Bench().with_pods(ready_pod("10.0.0.1:8000"))
    picks = GatewayPick(bench.router, bench.metrics)
    marks = [
        [one for one in door(bench, picks, prompt) if isinstance(one, bool)]
        for prompt in ("a short one", long_text(6000, next(_UNHEARD)))
    ]
    assert marks == [[GOES_ON] * 3, [GOES_ON, MAY_WAIT, GOES_ON, GOES_ON]]
    assert bench.sample("kvroute_router_picks_total", degraded="") >= 1
