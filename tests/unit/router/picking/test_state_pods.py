"""Requests that name stored state go to the pod that keeps it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace as replaced
from typing import Any

import pytest

from router.errors import RequestError
from router.picking.candidates import GONE, HELD, UNKNOWN, StatePods
from router.pods.pod_set import PodSet
from router.prompts.request import RequestKind, RouteRequest
from tests.support.router.bench import Bench, ready_pod

A, B = ready_pod("10.0.0.1:8000"), ready_pod("10.0.0.2:8000")
FILE = {"type": "message", "content": [{"type": "input_file", "file_id": "file-1"}]}


def asked(body: dict[str, Any], **fields: Any) -> RouteRequest:
    """Return a Responses request."""
    return RouteRequest("r", RequestKind.RESPONSES, body=body, **fields)


def states(pods: PodSet, counted: Counter[str] | None = None) -> StatePods:
    """Return a table in which pod B keeps one state of each kind."""
    counts = Counter[str]() if counted is None else counted
    table = StatePods(pods, lambda outcome: counts.update([outcome]))
    for state_id in ("resp_1", "conv_1", "file-1"):
        table.learn(state_id, B.address)
    return table


@pytest.mark.parametrize(
    "body",
    [
        {"previous_response_id": "resp_1"},
        {"conversation": "conv_1"},
        {"conversation": {"id": "conv_1"}},
        {"input": ["x", {"type": "input_image", "file_id": "file-1"}]},
        {"input": [{"content": "x"}, FILE]},
        {"previous_response_id": "resp_other", "input": [FILE]},
    ],
)
def test_a_request_goes_to_the_pod_that_keeps_its_state(body: dict[str, Any]) -> None:
    """A known response, conversation or file makes its pod the only candidate."""
    counted = Counter[str]()
    bench = Bench().with_pods(A, B)
    assert states(bench.pods, counted).bound(asked(body)).candidates == {B.address}
    assert counted == {HELD: 1}


@pytest.mark.parametrize(
    ("path", "is_bound"),
    [
        ("/v1/responses/resp_1", True),
        ("/v1/responses/resp_1/cancel?x=1", True),
        ("/v1/conversations/conv_1/items", True),
        ("/v1/files/file-1/content", True),
        ("/v1/models", False),
        ("/v1/responses/resp_" + "1" * 1_000_000, False),
    ],
)
def test_a_state_in_the_path_counts_too(path: str, is_bound: bool) -> None:
    """Requests of other APIs name state by their path."""
    request = RouteRequest("r", RequestKind.PASSTHROUGH, headers={":path": path})
    bound = states(Bench().with_pods(A, B).pods).bound(request)
    assert (bound.candidates == {B.address}) is is_bound


@pytest.mark.parametrize(
    ("body", "counts"),
    [
        ({"previous_response_id": "resp_unknown"}, {UNKNOWN: 1}),
        ({"previous_response_id": "x" * 1_000_000}, {}),
        ({"previous_response_id": 7, "conversation": ["conv_1"], "input": {"file_id": "file-1"}}, {}),
        ({"previous_response_id": "", "conversation": {"id": {}}, "input": [[FILE], 1, None]}, {}),
        ({"input": [{"file_id": [1]}, {"content": [[], "x", {"file_id": None}]}]}, {}),
    ],
)
def test_other_values_leave_the_request_as_it_is(body: dict[str, Any], counts: dict[str, int]) -> None:
    """Unknown and oversized ids and wrong types are left to the engine, and unknown ids are counted."""
    counted, request = Counter[str](), asked(body)
    assert states(Bench().with_pods(A, B).pods, counted).bound(request) is request
    assert counted == counts


def test_state_of_a_removed_or_restarted_pod_is_gone() -> None:
    """A request for state of a pod that is gone is rejected with 404, which names the field."""
    bench, counted = Bench().with_pods(A, B), Counter[str]()
    table = states(bench.pods, counted)
    restarted = replaced(B, entry=replaced(B.entry, epoch="2"))
    for pods in ((A,), (A, restarted)):
        bench.with_pods(*pods)
        with pytest.raises(RequestError, match=r"resp_1.* is gone") as raised:
            table.bound(asked({"previous_response_id": "resp_1"}))
        assert (raised.value.status, raised.value.param) == (404, "previous_response_id")
    assert counted == {GONE: 2}


def test_the_gateways_subset_is_obeyed() -> None:
    """A request whose gateway does not allow the state's pod gets 503."""
    table = states(Bench().with_pods(A, B).pods)
    request = asked({"previous_response_id": "resp_1"}, candidates=frozenset({A.address}))
    with pytest.raises(RequestError) as raised:
        table.bound(request)
    assert raised.value.status == 503


def test_the_table_is_bounded() -> None:
    """The latest and the used ones of a million ids stay; unusable ones are ignored."""
    pods = Bench().with_pods(A, B).pods
    table = StatePods(pods, capacity=1000)
    table.learn("resp_kept", B.address)
    for number in range(1_000_000):
        table.learn(f"resp_{number}", A.address)
        if number % 500 == 0:
            table.bound(asked({"previous_response_id": "resp_kept"}))
    table.learn("x" * 257, A.address)
    table.learn("", A.address)
    assert len(table) == 1000
    assert table.latest(2) == [("resp_999999", A.address), ("resp_999998", A.address)]
    assert table.bound(asked({"previous_response_id": "resp_kept"})).candidates == {B.address}
