"""A whole router over fake pods: readiness, death and return of pods, pages, health, reflection."""

from __future__ import annotations

import gc
import json
import logging
import queue
import threading
import warnings
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from router.app.server import RouterServer
from router.app.tls import TlsOptions
from router.errors import ConfigError, ListenError
from router.prompts.request import RequestKind, RouteRequest, api_request
from tests.support.router.bench import completion
from tests.support.router.doors import wait_until
from tests.support.router.server import (
    METRICS,
    FakePod,
    fake_pods,
    get,
    ready_pods,
    running_router,
    write_pods,
)

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def all_ready(router: RouterServer, *pods: FakePod) -> None:
    """Wait until exactly these pods are ready."""
    wait_until(lambda: ready_pods(router) == {pod.address for pod in pods}, "readiness")


def page(router: RouterServer, path: str) -> dict[str, Any]:
    """Return the content of a JSON page."""
    content: dict[str, Any] = json.loads(get(router, path)[1])
    return content


def health(port: int, service: str) -> int:
    """Call Check of a gRPC health server."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return int(stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=300).status)


@pytest.mark.parametrize("labels", [{}, {"llm-d.ai/role": "decode"}])
def test_the_start_logs_that_a_pool_fails_closed(
    tmp_path: Path, labels: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """If pods have a role label, the start logs that uncheckable bodies are rejected, and why."""
    with (
        caplog.at_level(logging.INFO, logger="router.app.server"),
        fake_pods(1) as (pod,),
        running_router(write_pods(tmp_path / "pods.yaml", [pod.address], **labels)),
    ):
        wait_until(lambda: "ready" in caplog.messages, "readiness")
    logged = [line for line in caplog.messages if "KV connector detected" in line]
    assert len(logged) == len(labels)
    assert all("sign=label llm-d.ai/role of pod" in line for line in logged)
    assert all("failure_mode_allow: false" in line for line in logged)


def test_a_dead_pod_leaves_and_a_returned_one_comes_back(tmp_path: Path) -> None:
    """A pod whose port closed is not picked until it is back; the other pod always is."""
    with (
        fake_pods(2) as (one, two),
        running_router(write_pods(tmp_path / "pods.yaml", [one.address, two.address])) as router,
    ):
        all_ready(router, one, two)
        one.stop()
        all_ready(router, two)
        picks = {router.router.route(completion(f"r{n}", "hello"), 0.0).primary.pod for n in range(5)}
        assert picks == {two.address}
        one.restart()
        all_ready(router, one, two)


def test_a_broken_connection_removes_a_pod_until_it_is_probed(tmp_path: Path) -> None:
    """A broken event stream or connection removes a pod at once; a healthy probe restores it."""
    with fake_pods(1) as (pod,), running_router(write_pods(tmp_path / "pods.yaml", [pod.address])) as router:
        all_ready(router, pod)
        pod.may_answer.clear()
        router.watch.link(pod.address, False)
        all_ready(router)
        pod.may_answer.set()
        all_ready(router, pod)
        pod.healthy = False
        router.watch.mark_not_ready(pod.address, "could not connect")
        all_ready(router)
        assert not router.pods.current[pod.address].ready
        pod.healthy = True
        all_ready(router, pod)


def test_a_changed_pods_file_is_applied_and_a_broken_one_is_not(tmp_path: Path) -> None:
    """A changed pods file adds and removes pods; a broken file changes nothing."""
    with fake_pods(2) as (one, two):
        path = write_pods(tmp_path / "pods.yaml", [one.address])
        with running_router(path) as router:
            all_ready(router, one)
            write_pods(path, [one.address, two.address])
            all_ready(router, one, two)
            path.write_text("endpoints: [nonsense")
            two.healthy = False
            all_ready(router, one)
            assert len(router.pods.current) == 2
            write_pods(path, [one.address])
            wait_until(lambda: list(router.pods.current) == [one.address], "the second pod's end")


def _adapters_are(router: RouterServer, address: str, number: int) -> bool:
    models = router.pods.current[address].models
    return router.pods.current[address].ready and models is not None and len(models.adapters) == number


def test_an_adapter_loaded_again_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An adapter that leaves and returns under its name is logged and listed by /ready."""
    with fake_pods(1) as (pod,), running_router(write_pods(tmp_path / "pods.yaml", [pod.address])) as router:
        for models in ([("m", None), ("tuned", "m")], [("m", None)], [("m", None), ("tuned", "m")]):
            pod.healthy = False
            all_ready(router)
            pod.models, pod.healthy = list(models), True
            wait_until(partial(_adapters_are, router, pod.address, len(models) - 1), "the adapters")
        told = json.loads(get(router, "/ready")[1])["prefixes_of_old_weights_may_hit"]
        assert told == {pod.address: ["tuned"]}
    assert f"pod={pod.address} adapters=tuned" in caplog.text


def test_a_new_model_on_a_known_pod_is_noticed(tmp_path: Path) -> None:
    """A pod that returns with another model serves that model."""
    with fake_pods(1) as (pod,), running_router(write_pods(tmp_path / "pods.yaml", [pod.address])) as router:
        all_ready(router, pod)
        pod.stop()
        all_ready(router)
        pod.models = [("other", None), ("tuned", "other")]
        pod.restart()
        all_ready(router, pod)
        models = router.pods.current[pod.address].models
        assert models is not None
        assert (models.base, models.adapters) == ("other", {"tuned"})


def test_a_drafter_is_known_of_each_rank(tmp_path: Path) -> None:
    """A page of several engines with counters of speculative decoding names a drafter for all of them."""
    with fake_pods(1) as (pod,), ExitStack() as opened:
        engines = METRICS.replace("num_gpu", 'engine="0",num_gpu')
        drafts = 'vllm:spec_decode_num_drafts_total{engine="0"} 0.0\n'
        pod.metrics = engines + engines.replace('engine="0"', 'engine="1"') + drafts
        labels = {"kvroute.io/kv-ranks": "2", "kvroute.io/kv-events-port": "5557"}
        router = opened.enter_context(
            running_router(write_pods(tmp_path / "pods.yaml", [pod.address], **labels))
        )
        wait_until(lambda: len(page(router, "/ready")["drafters"]) == 2, "the drafters of both ranks")
        lines = page(router, "/ready")["drafters"]
    text = "drafter: a block a hit assumed, not learned yet"
    assert sorted(lines) == [f"pod={pod.address}: {text}", f"pod={pod.address}@dp1: {text}"]


def test_an_engine_that_caches_nothing_is_named(tmp_path: Path) -> None:
    """/ready, /debug/pods and a metric name a pod whose prefix caching is off, with the flag to set."""
    with fake_pods(1) as (pod,), running_router(write_pods(tmp_path / "pods.yaml", [pod.address])) as router:
        pod.metrics = METRICS.replace('block_size="16"', 'block_size="16",enable_prefix_caching="False"')
        wait_until(lambda: page(router, "/ready")["engines"], "the fault")
        (line,) = page(router, "/ready")["engines"]
        assert pod.address in line
        assert "--enable-prefix-caching" in line
        assert page(router, "/debug/pods")["pods"][0]["faults"] == ["caching_off"]
        gauge = f'kvroute_router_engine_fault{{fault="caching_off",pod="{pod.address}"}} 1.0'
        assert gauge in get(router, "/metrics")[1].decode()
        pod.metrics = METRICS
        wait_until(lambda: not page(router, "/ready")["engines"], "the end of the fault")


def test_the_pages_show_which_models_the_pods_render(tmp_path: Path) -> None:
    """A model without tokenizer is rendered by its pod; readiness and metrics show it, and its pause."""
    with fake_pods(1) as (pod,), ExitStack() as opened:
        pod.models = [("other", None)]
        pod.answer = b'{"token_ids": [1, 2, 3]}'
        router = opened.enter_context(running_router(write_pods(tmp_path / "pods.yaml", [pod.address])))
        all_ready(router, pod)
        states = []
        for at in range(7):
            chat = {"model": "other", "messages": [{"role": "user", "content": str(at)}]}
            decision = router.router.route(api_request(f"r{at}", RequestKind.CHAT, chat, 400), 0.0)
            state = json.loads(get(router, "/ready")[1])["rendered_by_pods"]["other"]["state"]
            states.append((decision.degraded, decision.prompt_tokens, state))
            pod.answer = b"{}"
        assert states[0] == (None, 3, "rendering")
        assert [(reason, state) for reason, _, state in (states[1], states[-1])] == [
            ("no_tokenizer", "rendering"),
            ("no_tokenizer", "paused"),
        ]
        shown = get(router, "/metrics")[1].decode()
        assert 'kvroute_router_render_paused{model="other"} 1.0' in shown
        assert 'kvroute_router_render_seconds_count{outcome="ok"} 1.0' in shown
        assert 'kvroute_router_render_seconds_count{outcome="failed"} 5.0' in shown


def test_the_pages_show_the_state(tmp_path: Path) -> None:
    """Metrics, liveness, readiness, pods and decisions have pages; other paths get 404 with the list."""
    with fake_pods(1) as (pod,), running_router(write_pods(tmp_path / "pods.yaml", [pod.address])) as router:
        wait_until(lambda: get(router, "/ready")[0] == 200, "readiness")
        empty: list[str] = []
        lists = ("views_pending", "parity", "drafters", "routers", "engines", "pods_asleep")
        index: dict[str, object] = dict.fromkeys(lists, empty)
        index |= {"pods_failing": {}, "picks_ignored": None}
        index |= {"prefixes_of_old_weights_may_hit": {}, "rendered_by_pods": {}}
        assert json.loads(get(router, "/ready")[1]) == {"status": "ready", **index}
        all_ready(router, pod)
        router.router.route(completion("r1", "hello " * 40), 0.0)
        router.router.route(RouteRequest("r2", RequestKind.PASSTHROUGH), 0.0)
        text = get(router, "/metrics")[1].decode()
        assert 'llm_d_epp_ready_endpoints{name="default"} 1.0' in text
        assert f'kvroute_router_pod_kv_usage{{pod="{pod.address}"}} 0.5' in text
        shown = json.loads(get(router, "/debug/pods")[1])["pods"]
        assert [(known["address"], known["ready"], known["name"]) for known in shown] == [
            (pod.address, True, "pod-0")
        ]
        decisions = json.loads(get(router, "/debug/decisions?n=1")[1])["decisions"]
        assert [decision["request_id"] for decision in decisions] == ["r2"]
        (one,) = json.loads(get(router, "/debug/decisions?request_id=r1")[1])["decisions"]
        assert (one["pod"], one["pod_name"]) == (pod.address, "pod-0")
        assert json.loads(get(router, "/debug/decisions?request_id=none")[1]) == {"decisions": []}
        assert [get(router, path)[0] for path in ("/healthz", "/debug/decisions?n=x", "/secrets")] == [
            200,
            400,
            404,
        ]


def test_health_follows_readiness_and_liveness_does_not(tmp_path: Path) -> None:
    """Health of each service follows readiness on both ports, from the first sync to the drain."""
    names = ("", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor", "kvroute.v1.EndpointPicker")
    with fake_pods(1) as (pod,):
        pod.may_answer.clear()
        with running_router(write_pods(tmp_path / "pods.yaml", [pod.address]), sync_timeout_s=60.0) as router:
            port = router.ports["grpc-health"]
            assert [health(port, name) for name in ("", "liveness")] == [NOT_SERVING, SERVING]
            assert get(router, "/ready")[0] == 503
            pod.may_answer.set()
            all_ready(router, pod)
            router.index.follow([])
            wait_until(lambda: health(port, "") == SERVING, "serving")
            assert {health(port, name) for name in names} == {SERVING}
            assert {health(router.ports["grpc"], name) for name in names} == {SERVING}
            router.drain()
            assert [health(port, name) for name in ("readiness", "liveness")] == [NOT_SERVING, SERVING]


def test_reflection_shows_the_services(tmp_path: Path) -> None:
    """A reflection client finds both services and the description of PickEndpoint."""
    with (
        running_router(write_pods(tmp_path / "pods.yaml", [])) as router,
        grpc.insecure_channel(f"127.0.0.1:{router.ports['grpc']}") as channel,
    ):
        database = ProtoReflectionDescriptorDatabase(channel)
        assert {"envoy.service.ext_proc.v3.ExternalProcessor", "kvroute.v1.EndpointPicker"} <= set(
            database.get_services()
        )
        pool = descriptor_pool.DescriptorPool(database)
        service = pool.FindServiceByName("kvroute.v1.EndpointPicker")
        assert [method.name for method in service.methods] == ["PickEndpoint", "ReportOutcome"]


def test_a_port_in_use_is_one_clear_error(tmp_path: Path) -> None:
    """A port in use is an error that names the flag and the port, for each of the three ports."""
    path = write_pods(tmp_path / "pods.yaml", [])
    with running_router(path) as router:
        for flag, port in router.ports.items():
            settings = {f"{flag.replace('-', '_')}_port": port}
            with (
                pytest.raises(ListenError, match=rf"--{flag}-port {port}: .*in use"),
                running_router(path, **settings),
            ):
                pass


def test_a_start_that_fails_leaves_nothing_open(tmp_path: Path) -> None:
    """A failed start closes every port, thread and loop opened before."""
    path, tls = write_pods(tmp_path / "pods.yaml", []), TlsOptions(cert_dir=tmp_path / "absent")
    with pytest.raises(ConfigError, match="absent") as caught, running_router(path, tls=tls):
        pass
    del caught
    with warnings.catch_warnings(record=True) as unclosed:
        warnings.simplefilter("always")
        gc.collect()
    assert [str(warning.message) for warning in unclosed] == []


def test_a_missing_or_wrong_pods_file_stops_the_start(tmp_path: Path) -> None:
    """A missing or invalid pods file ends the start with the file and line."""
    with pytest.raises(ConfigError, match=r"absent\.yaml"), running_router(tmp_path / "absent.yaml"):
        pass
    broken = tmp_path / "pods.yaml"
    broken.write_text("endpoints:\n  - name: a\n    adress: 127.0.0.1\n")
    with pytest.raises(ConfigError, match=r"pods\.yaml:3: .*adress"), running_router(broken):
        pass


def test_an_unreadable_message_does_not_block_close(tmp_path: Path) -> None:
    """A peer that sent an unreadable message and keeps its stream open does not block close()."""
    # Not every such call hangs in gRPC: several make it certain.
    streams = [queue.Queue[bytes | None]() for _ in range(8)]
    with (
        fake_pods(1) as (pod,),
        running_router(write_pods(tmp_path / "pods.yaml", [pod.address])) as router,
        grpc.insecure_channel(f"127.0.0.1:{router.ports['grpc']}") as channel,
    ):
        call = channel.stream_unary("/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs")
        refused = [call.future(iter(stream.get, None)) for stream in streams]
        for stream in streams:
            stream.put(b"\xff\xff\xff")
        codes = {future.exception(timeout=300).code() for future in refused}
        assert codes == {grpc.StatusCode.INTERNAL}
        closing = threading.Thread(target=router.close, daemon=True)
        closing.start()
        closing.join(300)
        for stream in streams:
            stream.put(None)
        assert not closing.is_alive()
