"""Stored responses over real gRPC: their pods are learnt from responses and used by later requests."""

from __future__ import annotations

import json

import pytest

from router.doors.ext_proc import ExtProcOptions
from tests.support.router.bench import TINY, Bench, ready_pod
from tests.support.router.doors import (
    ServedBench,
    body,
    headers,
    response_body,
    response_headers,
    serving,
    set_headers,
)

pytestmark = pytest.mark.usefixtures("each_transport")

PODS = [ready_pod(f"10.0.0.{number}:8000") for number in range(1, 5)]
DESTINATION = "x-gateway-destination-endpoint"
STORED = {"id": "resp_1", "object": "response", "usage": None}
EVENTS = (
    b'event: response.created\ndata: {"response":%b,"type":"response.created"}\n\n'
    b'data: {"type":"response.output_text.delta","delta":"\\"object\\":\\"response\\""}\n\n'
)


def turn(served: ServedBench, answer: bytes, kind: str, status: str = "200", **fields: object) -> str:
    """Send a Responses request and its answer; return the destination."""
    stream = served.stream()
    told = json.dumps({"model": TINY, "input": "hello", **fields}).encode()
    stream.send(headers(path="/v1/responses"), body(told))
    destination = set_headers(stream.receive())[DESTINATION]
    stream.send(response_headers(status=status, content_type=kind), response_body(answer, end=True))
    stream.rest()
    return destination


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (json.dumps(STORED).encode(), "application/json"),
        (EVENTS % json.dumps(STORED).encode(), "text/event-stream"),
    ],
)
def test_the_next_turn_goes_to_the_pod_of_the_last(answer: bytes, kind: str) -> None:
    """The id of a stored response, streamed or not, leads its next turn to its pod."""
    bench = Bench().with_pods(*PODS)
    with serving(bench, ExtProcOptions(responses_full=True)) as served:
        home = turn(served, answer, kind)
        nexts = {turn(served, b"{}", kind, previous_response_id="resp_1") for _ in range(6)}
        assert nexts == {home}
        bench.with_pods(*(pod for pod in PODS if pod.address != home))
        told = json.dumps({"model": TINY, "input": "x", "previous_response_id": "resp_1"}).encode()
        refused = served.exchange(headers(path="/v1/responses"), body(told))[0].immediate_response
    error = json.loads(refused.body)["error"]
    assert (refused.status.code, error["type"], error["param"]) == (
        404,
        "NotFoundError",
        "previous_response_id",
    )
    assert bench.sample("kvroute_router_stateful_requests_total", outcome="held") == 6
    assert bench.sample("kvroute_router_stateful_requests_total", outcome="gone") == 1


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (STORED, "500"),
        (STORED, "400"),
        ({**STORED, "object": "chat.completion"}, "200"),
        ({**STORED, "id": 7}, "200"),
        ({**STORED, "id": "resp_" + "1" * 1_000_000}, "200"),
        ({"metadata": STORED}, "200"),
    ],
)
def test_other_answers_teach_nothing(answer: dict[str, object], status: str) -> None:
    """Failed answers, other objects, unusable ids and clients' own fields are not learnt."""
    bench = Bench().with_pods(*PODS)
    with serving(bench, ExtProcOptions(responses_full=True)) as served:
        turn(served, json.dumps(answer).encode(), "application/json", status)
    assert bench.lifecycle.states is not None
    assert len(bench.lifecycle.states) == 0
