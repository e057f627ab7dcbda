"""The router behind a real Envoy with fake pods: each service and response mode, forgeries, lost peers."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.loopback import HERE
from tests.support.router.bench import TINY
from tests.support.router.doors import wait_until
from tests.support.router.envoy import BODY, Gateway, Mode, gateway, request_bytes
from tests.support.router.server import get, ready_pods


@pytest.fixture(params=["check_grpc", "ext_proc usage", "ext_proc full"])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Gateway]:
    """Run a gateway with each service and response mode."""
    with gateway(tmp_path, request.param) as running:
        yield running


def latest_end(served: Gateway) -> dict[str, Any]:
    """Return how the latest request ended, recorded a moment after its ledger entry is removed."""
    wait_until(lambda: served.router.decision_log.latest(1)[0]["end"], "the record of its end")
    end: dict[str, Any] = served.router.decision_log.latest(1)[0]["end"]
    return end


def test_a_request_goes_to_the_picked_pod_and_ends_in_the_ledger(served: Gateway) -> None:
    """Envoy sends the request to the decision's pod, and the request's end is reported in each mode."""
    response = served.post(BODY)
    assert (response.status, response.json()) == (200, {"ok": True})
    decision = served.decision(response)
    assert response.headers["x-kvroute-pod"] == decision["pod"]
    assert decision["degraded"] is None
    wait_until(lambda: served.decision(response)["end"], "the request's end")
    end = served.decision(response)["end"]
    # Reports of ext_proc and of the access log race.
    full = "x-went-into-resp-headers" in response.headers
    assert end["source"] in ({"response", "access_log"} if full else {"access_log"})
    assert end["failed"] is False


def test_a_client_cannot_choose_its_pod(served: Gateway) -> None:
    """A forged destination is overwritten, and control headers do not reach the pod."""
    forged = {"x_gateway_destination_endpoint": "127.0.0.1:1", "x_llm_d_inference_objective": "mine"}
    response = served.post(BODY, hi="mom", **forged)
    assert response.status == 200
    (seen,) = [headers for pod in served.pods for headers in pod.seen]
    assert seen["x-gateway-destination-endpoint"] == response.headers["x-kvroute-pod"]
    assert seen["hi"] == "mom"
    assert "x-llm-d-inference-objective" not in seen


@pytest.mark.parametrize("padding", [0, 200_000])
def test_a_client_cannot_send_kv_transfer_parameters(served: Gateway, padding: int) -> None:
    """Forbidden fields are removed from the body, or the client gets 400; a pod never receives them."""
    told = {**BODY, "prompt": "hello " + "a" * padding, "stream": False}
    hostile = {**told, "kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": []}}
    response = served.post(hostile, x_data_parallel_rank="7", x_prefiller_host_port="10.0.0.9:1")
    bodies = [json.loads(body) for pod in served.pods for body in pod.bodies]
    if response.status == 400:
        error = response.json()["error"]
        assert (error["param"], error["type"]) == ("kv_transfer_params", "BadRequestError")
        assert bodies == []
        response = served.post(told, x_data_parallel_rank="7", x_prefiller_host_port="10.0.0.9:1")
        bodies = [json.loads(body) for pod in served.pods for body in pod.bodies]
    assert (response.status, bodies) == (200, [told])
    (seen,) = [headers for pod in served.pods for headers in pod.seen]
    assert not {"x-data-parallel-rank", "x-prefiller-host-port"}.intersection(seen)


def test_large_bodies_arrive_whole_and_larger_ones_are_refused(served: Gateway) -> None:
    """A body of many chunks reaches the pod unchanged; one above the limit gets 413 in OpenAI's format."""
    large = json.dumps({**BODY, "prompt": "a" * 1_500_000}).encode()
    assert served.post(large).status == 200
    assert [body for pod in served.pods for body in pod.bodies] == [large]
    refused = served.post(b" " * 10_000_000)
    assert (refused.status, refused.json()["error"]["code"]) == (413, 413)


def test_errors_and_pass_through_reach_the_client(served: Gateway) -> None:
    """Malformed JSON and an unknown model get the router's errors, other paths a pod's response."""
    assert served.post(b"{nonsense").json()["error"]["type"] == "BadRequestError"
    unknown = served.post({**BODY, "model": "gpt-9"})
    assert (unknown.status, unknown.json()["error"]["param"]) == (404, "model")
    assert served.get("/v1/models").json()["data"][0]["id"] == TINY
    assert served.post(b"anything", path="/tokenize").status == 200


def test_the_routers_own_503_reaches_the_client_whole(served: Gateway) -> None:
    """If no pod can be picked, the client gets the status, the protocol's reason and OpenAI's format."""
    for pod in served.pods:
        pod.healthy = False
    wait_until(lambda: not ready_pods(served.router), "the pods' illness")
    refused = served.post(BODY)
    assert (refused.status, refused.json()["error"]["code"]) == (503, 503)
    assert refused.headers["x-llm-d-request-dropped-reason"] == "rejected-no-endpoints"
    assert refused.headers["content-type"] == "application/json"


def test_parallel_responses_are_neither_cut_nor_lost(served: Gateway) -> None:
    """500 plain and streamed responses to 64 clients are complete, and every ledger entry ends."""
    answer = json.dumps({"text": "x" * 20_000}).encode()
    for pod in served.pods:
        pod.answer = answer

    def one(number: int) -> bytes:
        return served.post({**BODY, "prompt": f"{number} hello", "stream": number % 3 > 0}).data

    with ThreadPoolExecutor(64) as pool:
        assert set(pool.map(one, range(500))) == {answer}
    wait_until(lambda: len(served.router.lifecycle.ledger) == 0, "all requests' ends")


def test_a_disconnected_client_ends_its_request_as_failed(served: Gateway) -> None:
    """A request whose client disconnects in the middle of the response ends as failed."""
    for pod in served.pods:
        pod.may_finish.clear()
    with socket.create_connection(served.address) as client:
        client.sendall(request_bytes({**BODY, "stream": True}))
        assert client.recv(100).startswith(b"HTTP/1.1 200")
        assert len(served.router.lifecycle.ledger) == 1
    wait_until(lambda: len(served.router.lifecycle.ledger) == 0, "the request's end")
    assert latest_end(served)["failed"] is True


def test_no_other_request_of_its_id_ends_one_in_flight(served: Gateway) -> None:
    """A rejected and a bodiless request do not end another request in flight with the same id."""
    for pod in served.pods:
        pod.may_finish.clear()
    with socket.create_connection(served.address) as client:
        client.sendall(request_bytes({**BODY, "stream": True}, "x-request-id: r\r\n"))
        assert client.recv(100).startswith(b"HTTP/1.1 200")
        assert served.post({**BODY, "model": "gpt-9"}, x_request_id="r").status == 404
        assert served.get("/v1/models", x_request_id="r").status == 200
        logged = b'kvroute_router_access_log_entries_total{join="no_work"} 2.0'
        wait_until(lambda: logged in get(served.router, "/metrics")[1], "the log")
        assert len(served.router.lifecycle.ledger) == 1
    wait_until(lambda: len(served.router.lifecycle.ledger) == 0, "its own end")


def test_requests_of_a_killed_envoy_are_ended_by_engine_counts(served: Gateway) -> None:
    """Requests of a killed Envoy, whose ends nobody reports, are ended by the engines' own counts."""
    for pod in served.pods:
        pod.may_finish.clear()
    with socket.create_connection(served.address) as client:
        client.sendall(request_bytes({**BODY, "stream": True}))
        assert client.recv(100).startswith(b"HTTP/1.1 200")
        served.envoy.kill()
        served.envoy.wait()
    wait_until(lambda: len(served.router.lifecycle.ledger) == 0, "the engines' counts")
    assert latest_end(served)["source"] in ("scrape", "response")


@pytest.mark.parametrize(
    ("mode", "fail_open"),
    [
        ("check_grpc", False),
        ("check_grpc", True),
        ("ext_proc usage", False),
        ("ext_proc full", False),
    ],
)
def test_without_a_router_envoy_fails_closed_or_open(tmp_path: Path, mode: Mode, fail_open: bool) -> None:
    """Without a router, requests fail with 5xx or go round-robin, as configured; never to forged pods."""
    with gateway(tmp_path, mode, fail_open=fail_open) as served:
        assert served.post(BODY).status == 200
        served.router.close()
        answers = [served.post(BODY, x_gateway_destination_endpoint="127.0.0.1:1") for _ in range(4)]
        if fail_open:
            assert {answer.status for answer in answers} == {200}
            assert len({answer.headers["x-kvroute-pod"] for answer in answers}) == 2
        else:
            assert {answer.status for answer in answers} <= {500, 503}


@pytest.mark.parametrize("pods_host", [HERE, "::1"])
def test_a_lost_pod_is_noticed_by_its_failed_connection(tmp_path: Path, pods_host: str) -> None:
    """A pod to which Envoy cannot connect is removed by the access log before its probes fail."""
    with gateway(tmp_path, "check_grpc", pods_host=pods_host, refresh_interval_s=3600.0) as served:
        one, two = served.pods
        one.stop()
        answers = [served.post({**BODY, "prompt": f"{n} hello"}).status for n in range(20)]
        assert 200 in answers
        wait_until(lambda: ready_pods(served.router) == {two.address}, "the lost pod's end")
        one.restart()


def test_a_request_that_its_pod_has_not_received_is_retried(tmp_path: Path) -> None:
    """Envoy retries a request that its pod has not received, at most three times."""
    with gateway(tmp_path, "check_grpc", refresh_interval_s=3600.0) as served:
        for pod in served.pods:
            pod.stop()
        assert served.post(BODY).status == 503
        assert served.stat("cluster.picked_pod.upstream_rq_retry") == 3


def test_envoy_closes_idle_connections_before_pods_do(tmp_path: Path) -> None:
    """Envoy closes an idle connection before its pod does, so that no request is lost in the race."""
    with gateway(tmp_path, "check_grpc") as served:
        assert served.post(BODY).status == 200
        wait_until(lambda: sum(pod.ended for pod in served.pods) == 1, "the connection's end")
        assert served.post(BODY).status == 200
