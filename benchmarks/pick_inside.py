"""CPU of a pick inside the router, by step: the service's code on whole requests, without sockets.

`python -m benchmarks.pick_inside [--json] [--quick] [--rounds N]`; also the last part of `benchmarks.pick`.
16 pods, of which 8 have each warm conversation cached, as published by real events; each request adds a turn
to one. Figures are CPU of the calling thread, medians over rounds. `route_SIZE_us` is a request from its
bytes to the response's, `end_SIZE_us` its end, `pick_SIZE_us` the same request through PickEndpoint and
`expire_SIZE_us` its expiry. `route_SIZE_STEP_us` are the steps, from separate rounds in which each step
includes reading the clock.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from envoy.service.auth.v3 import external_auth_pb2
from prometheus_client import CollectorRegistry

from benchmarks import BASE_PORT
from benchmarks.conversations import SIZES, write_bodies
from benchmarks.fake_events import BLOCK_TOKENS
from benchmarks.fake_pod import MAX_MODEL_LEN, MODEL, model_directory
from benchmarks.next_turns import next_turns
from benchmarks.report import Options, read_options
from indexer import IndexerConfig, KvIndexer, PodStream, StreamState
from indexer.pod_entry import PodEntry
from router._pb import endpoint_picker_pb2 as pb
from router.analysis.feed import Analysis
from router.doors.boundary import BodyGuard
from router.doors.ext_authz import ExtAuthzService
from router.doors.health import CHECK_SERVICE, PICK_SERVICE
from router.doors.pick import EndpointPickerService
from router.feedback.lifecycle import Lifecycle
from router.feedback.outcomes import ACCESS_LOG, DONE, RequestReport
from router.inflight.failures import PodFailures
from router.inflight.ledger import Ledger, LedgerParameters
from router.inflight.rates import PrefillRates, RateParameters
from router.observe.decision_log import DecisionLog
from router.observe.metrics import RouterMetrics
from router.observe.requests import ObservedRouter
from router.picking.flow_queue import UtilizationDetector
from router.picking.route import Admission, Router
from router.picking.scheduler import Scheduler
from router.pods.engine_load import EngineLoad
from router.pods.pod_set import Pod, PodSet, ServedModels
from router.prompts.tokenizer_sources import open_tokenizers
from router.prompts.tokenizers import TokenizeOptions, TokenizerRegistry

_PODS = 16
_EVENTS_PORT, _REPLAY_PORT = BASE_PORT + 201, BASE_PORT + 301
_WAIT_S = 120.0
# Far away, so that a busy machine cannot turn the measured work into a rejection.
_DEADLINE_S = 30.0
_BODY_BYTES_MAX = 8 << 20
_DECISIONS_KEPT = 1000
# After the ledger's request lifetime.
_LIFETIME_S = 1e6
# Number of concurrent requests in flight.
_CLIENTS = 32
_BURSTS = {"small": 32, "40kb": 16, "400kb": 4}
_PATH = "/v1/chat/completions"
_HEADERS = {
    ":authority": "127.0.0.1:8080",
    ":method": "POST",
    ":path": _PATH,
    "content-type": "application/json",
    "x-forwarded-proto": "http",
    "x-envoy-auth-partial-body": "false",
}


class Inside:
    """One router without listeners, with views built from real events.

    Args:
        bodies: File with one chat body per line, cached at every second pod.
    """

    def __init__(self, bodies: Path) -> None:
        registry = CollectorRegistry()
        pods = PodSet()
        ledger = Ledger(LedgerParameters(), pods.load_table)
        metrics = RouterMetrics(registry)
        decision_log = DecisionLog(_DECISIONS_KEPT, lambda address: address, metrics)
        rates = PrefillRates(RateParameters(), pods.load_table)
        self.index = KvIndexer(IndexerConfig(block_tokens=BLOCK_TOKENS), registry=registry)
        self.lifecycle = Lifecycle(
            ledger,
            rates,
            decision_log,
            self.index.settle,
            self.index.cancel_expectation,
            PodFailures(pods.load_table),
        )
        self.tokenizers = TokenizerRegistry(
            open_tokenizers({MODEL: model_directory(bodies)}), TokenizeOptions(deadline_s=_DEADLINE_S)
        )
        self.scheduler = Scheduler(
            pods.load_table, ledger, np.random.default_rng(7), block_tokens=self.index.block_tokens
        )
        self._analysis = Analysis(pods, self.index, decision_log)
        self._analysis.start()
        routed = Router(
            pods=pods,
            tokenizers=self.tokenizers,
            index=self.index,
            admission=Admission({}, UtilizationDetector(load_age_max_s=5.0), pods.load_table),
            scheduler=self.scheduler,
            dispatched=self.lifecycle.decided,
            failures=self.lifecycle.failures,
            picked=self._analysis.queue.picked,
        )
        self.router = ObservedRouter(routed, metrics)
        check = ExtAuthzService(self.router, BodyGuard(), metrics, _BODY_BYTES_MAX)
        self.answer = _served(_handler(check, f"/{CHECK_SERVICE}/Check"))
        picks = EndpointPickerService(self.router, self.lifecycle, metrics, pods)
        self.pick_endpoint = _served(_handler(picks, f"/{PICK_SERVICE}/PickEndpoint"))
        self._numbers = count()
        # Keep the publisher alive as long as the router: a view without one is not EXACT.
        argv = [sys.executable, "-m", "benchmarks.fake_events", str(_EVENTS_PORT), str(_REPLAY_PORT)]
        self._events = subprocess.Popen([*argv, str(_PODS), str(bodies)], stdin=subprocess.PIPE)
        entries = [PodEntry(f"pod-{at}", "bench", f"10.0.0.{at}", 8000) for at in range(_PODS)]
        pods.declare(entries)
        for entry in entries:
            pods.put(_pod(entry))
        self._follow([entry.pod for entry in entries])

    def requests(self, bodies: Iterator[bytes], number: int) -> list[tuple[str, bytes]]:
        """Yield requests with new ids, as Envoy sends them."""
        made = []
        for body, at in zip(bodies, range(number), strict=False):
            request_id = f"{next(self._numbers):08x}-0000-4000-8000-{at:012x}"
            message = external_auth_pb2.CheckRequest()
            http = message.attributes.request.http
            http.method, http.path, http.size, http.raw_body = "POST", _PATH, len(body), body
            http.headers.update(_HEADERS | {"content-length": str(len(body)), "x-request-id": request_id})
            made.append((request_id, message.SerializeToString()))
        return made

    def end(self, request_id: str) -> None:
        """Report the end of a request as an access log entry."""
        report = RequestReport(request_id, DONE, ACCESS_LOG, late_s=0.01)
        self.lifecycle.ended(report, time.monotonic())

    def close(self) -> None:
        """Stop the router's threads and the pods."""
        self._analysis.close()
        self.index.close()
        self.tokenizers.close()
        self._events.kill()
        self._events.communicate()

    def _follow(self, pods: list[str]) -> None:
        """Have the pods publish their blocks, and wait until the index has them."""
        streams = [
            PodStream(
                pod,
                MODEL,
                f"tcp://127.0.0.1:{_EVENTS_PORT + at}",
                f"tcp://127.0.0.1:{_REPLAY_PORT + at}",
            )
            for at, pod in enumerate(pods)
        ]
        self.index.start()
        self.index.follow(streams)
        deadline_s, before = time.monotonic() + _WAIT_S, -1
        while before != self.index.stats().holdings or not before or not self._is_exact(pods):
            if time.monotonic() > deadline_s:
                raise TimeoutError("the pods' events did not come")
            before = self.index.stats().holdings
            time.sleep(1.0)
        if self._events.poll() is not None:
            # Pods of an earlier run may still use these ports.
            raise RuntimeError("the pods ended at once: is another benchmark running?")

    def _is_exact(self, pods: list[str]) -> bool:
        states = self.index.states()
        return all(states.get(pod) is StreamState.EXACT for pod in pods)


def measure(bodies: dict[str, Path], options: Options) -> None:
    """Print the figures of every size."""
    report, rounds, bursts = options.report, options.rounds, options.of_size(30, 1)
    inside = Inside(bodies["small" if options.quick else "all"])
    try:
        for size in SIZES:
            burst = options.of_size(_BURSTS[size], 2)
            chats = bodies[size].read_bytes().splitlines()[: burst if options.quick else None]
            # Send each chat once before it continues.
            _round(inside, iter(chats), len(chats), 1)
            lines = next_turns(chats)
            whole: list[float] = []
            ends: list[float] = []
            for at in range(rounds + 1):
                route_us, end_us = _round(inside, lines, burst, bursts)
                if at:  # the first warms caches
                    whole.append(route_us)
                    ends.append(end_us)
            report.figure(f"route_{size}_us", "us", whole, pods=_PODS, cpu="thread")
            report.figure(f"end_{size}_us", "us", ends, pods=_PODS, cpu="thread")
            for name, values in _picks(inside, lines, burst, bursts, rounds).items():
                report.figure(f"{name}_{size}_us", "us", values, pods=_PODS, cpu="thread")
            for name, values in _parts(inside, lines, burst, bursts, rounds).items():
                report.figure(f"route_{size}_{name}_us", "us", values, pods=_PODS, cpu="thread")
    finally:
        inside.close()


def _round(inside: Inside, lines: Iterator[bytes], burst: int, bursts: int) -> tuple[float, float]:
    """Return the CPU microseconds of a request, and of its end."""
    route_ns = end_ns = 0
    for _ in range(bursts):
        requests = inside.requests(lines, burst)
        then_ns = time.thread_time_ns()
        for _, received in requests:
            inside.answer(received)
        routed_ns = time.thread_time_ns()
        for request_id, _ in requests:
            inside.end(request_id)
        route_ns += routed_ns - then_ns
        end_ns += time.thread_time_ns() - routed_ns
    each = 1000 * burst * bursts
    return route_ns / each, end_ns / each


def _picks(
    inside: Inside, lines: Iterator[bytes], burst: int, bursts: int, rounds: int
) -> dict[str, list[float]]:
    """Return the CPU microseconds of a PickEndpoint call, and of its expiry."""
    values: dict[str, list[float]] = {"pick": [], "expire": []}
    for at in range(rounds + 1):
        pick_ns = expire_ns = 0
        for _ in range(bursts):
            calls = [_pick_request(line) for line, _ in zip(lines, range(burst), strict=False)]
            then_ns = time.thread_time_ns()
            for call in calls:
                inside.pick_endpoint(call)
            picked_ns = time.thread_time_ns()
            inside.lifecycle.expire(time.monotonic() + _LIFETIME_S)
            pick_ns += picked_ns - then_ns
            expire_ns += time.thread_time_ns() - picked_ns
        if at:  # the first warms caches
            values["pick"].append(pick_ns / (1000 * burst * bursts))
            values["expire"].append(expire_ns / (1000 * burst * bursts))
    return values


def _pick_request(body: bytes) -> bytes:
    chat = json.loads(body)
    messages = json.dumps(chat["messages"]).encode()
    request = pb.PickEndpointRequest(model=chat["model"], chat=pb.ChatInput(messages_json=messages))
    return request.SerializeToString()


def _handler(door: ExtAuthzService | EndpointPickerService, path: str) -> Any:
    """Return the service's method, as a gRPC server looks it up."""
    found: dict[str, Any] = {}

    def add(_service: str, handlers: dict[str, Any]) -> None:
        found.update(handlers)

    door.add_to(SimpleNamespace(add_registered_method_handlers=add))  # type: ignore[arg-type]
    return found[path.rpartition("/")[2]]


def _served(handler: Any) -> Callable[[bytes], bytes]:
    """Return the method as a gRPC server calls it: bytes in, bytes out."""
    context = SimpleNamespace(is_active=lambda: True)
    return lambda message: handler.unary_unary(handler.request_deserializer(message), context)


def _parts(
    inside: Inside, lines: Iterator[bytes], burst: int, bursts: int, rounds: int
) -> dict[str, list[float]]:
    """Return CPU microseconds of a request's steps."""
    values: dict[str, list[float]] = {}
    with _watched(inside) as took_ns:
        for _ in range(rounds):
            took_ns.clear()
            _round(inside, lines, burst, bursts)
            for name, ns in took_ns.items():
                values.setdefault(name, []).append(ns / (1000 * burst * bursts))
    return values


@contextmanager
def _watched(inside: Inside) -> Iterator[dict[str, int]]:
    """Patch the steps so that they accumulate their nanoseconds."""
    took_ns: dict[str, int] = {}
    steps: list[tuple[Any, str, str]] = [
        (inside.tokenizers, "prompt_tokens", "tokens"),
        (inside.index, "block_keys", "keys"),
        (inside.index, "match", "match"),
        (inside.scheduler, "schedule", "schedule"),
        (inside.index, "speculate", "speculate"),
        (inside.router.router, "dispatched", "decided"),
        (type(inside.router), "route", "whole"),
    ]
    kept = [(owner, method, getattr(owner, method)) for owner, method, _ in steps]
    for owner, method, name in steps:
        setattr(owner, method, _timed(getattr(owner, method), name, took_ns))
    try:
        yield took_ns
    finally:
        for owner, method, original in kept:
            setattr(owner, method, original)


def _timed(call: Callable[..., object], name: str, took_ns: dict[str, int]) -> Callable[..., object]:
    @wraps(call)
    def timed(*args: object, **kwargs: object) -> object:
        then_ns = time.thread_time_ns()
        answer = call(*args, **kwargs)
        took_ns[name] = took_ns.get(name, 0) + time.thread_time_ns() - then_ns
        return answer

    return timed


def _pod(entry: PodEntry) -> Pod:
    load = EngineLoad(waiting=0, running=0, kv_usage=0.1, kv_capacity_tokens=16_000_000, scraped_s=0.0)
    models = ServedModels(MODEL, frozenset({MODEL}), max_model_len=MAX_MODEL_LEN)
    return Pod(entry.pod, entry.name, entry, ready=True, why="", probed=True, models=models, load=load)


def main() -> int:
    """Measure and print all figures."""
    read = read_options(__doc__)
    read.report.machine()
    with tempfile.TemporaryDirectory(prefix="kvroute-bench-") as name:
        bodies = write_bodies(Path(name), tiny=read.quick)
        measure(bodies, read)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
