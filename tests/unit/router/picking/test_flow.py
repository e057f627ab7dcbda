"""Flow control: queueing, dispatch order, and every reason for a rejection."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from router.config.picker_file import BandSettings, FlowSettings, parse_config
from router.errors import ConfigError, RequestError
from router.picking.flow import FlowControl
from router.picking.flow_queue import (
    FAIRNESS,
    ConcurrencyDetector,
    FlowQueue,
    QueuedRequest,
    UtilizationDetector,
    fairness_id_reader,
    read_flow_settings,
)
from router.pods.load_table import POD
from router.pods.pod_set import PodSet
from router.prompts.request import RequestKind, RouteRequest
from tests.support.router.bench import entry, ready_pod
from tests.support.router.doors import wait_until

FCFS, EDF, SLO = "fcfs-ordering-policy", "edf-ordering-policy", "slo-deadline-ordering-policy"


def waiting(flow: str = "", priority: int = 0, **known: Any) -> QueuedRequest:
    """Return a queued request."""
    defaults = {"size_bytes": 10, "arrived_s": 0.0, "deadline_s": 60.0, "due_s": 1.0}
    return QueuedRequest(flow, priority, **{**defaults, **known})


def drained(queue: FlowQueue) -> list[QueuedRequest]:
    """Return all queued requests in dispatch order."""
    return list(iter(queue.take, None))


def test_requests_are_dispatched_by_priority_then_arrival() -> None:
    """Requests of a higher priority leave the queue first, those of one priority in order of arrival."""
    queue = FlowQueue(FlowSettings())
    low, high, later = waiting(priority=-1), waiting(priority=5), waiting(priority=5)
    for one in (low, high, later):
        assert queue.put(one)
    assert drained(queue) == [high, later, low]
    assert (len(queue), queue.size_bytes) == (0, 0)


@pytest.mark.parametrize(("order", "field"), [(EDF, "deadline_s"), (SLO, "due_s")])
def test_deadline_policies_dispatch_the_earliest_deadline_first(order: str, field: str) -> None:
    """EDF orders by the expiry of the request, the SLO policy by the client's target."""
    queue = FlowQueue(FlowSettings(default_priority_band=BandSettings(order=order)))
    late, soon = waiting(**{field: 9.0}), waiting(**{field: 3.0})
    queue.put(late)
    queue.put(soon)
    assert drained(queue) == [soon, late]


def test_round_robin_alternates_between_flows() -> None:
    """Round-robin fairness serves one request of each flow in turn; strict fairness serves by arrival."""
    for fairness, expected in ((FAIRNESS[0], "aaabc"), (FAIRNESS[1], "abcaa")):
        queue = FlowQueue(FlowSettings(default_priority_band=BandSettings(fairness=fairness)))
        for flow in "aaabc":
            queue.put(waiting(flow))
        assert "".join(one.flow for one in drained(queue)) == expected


def test_a_full_queue_rejects_requests() -> None:
    """Requests and bytes are limited per band and in total; a removed request frees its share."""
    bands = BandSettings(1, 1, 100), BandSettings(2, 9, 25)
    queue = FlowQueue(FlowSettings(requests_max=3, bytes_max=45, priority_bands=bands))
    first = waiting(priority=1)
    assert queue.put(first)
    assert not queue.put(waiting(priority=1))
    assert [queue.put(waiting(priority=2)) for _ in range(3)] == [True, True, False]
    assert not queue.put(waiting())
    queue.remove(first)
    assert not queue.put(waiting(size_bytes=30))
    assert queue.put(waiting(priority=1))


@given(st.lists(st.tuples(st.integers(-2, 2), st.sampled_from("abc"), st.booleans()), max_size=60))
def test_every_queued_request_is_dispatched_exactly_once(asked: list[tuple[int, str, bool]]) -> None:
    """Each queued request is dispatched once unless removed, and the counters return to zero."""
    turns = BandSettings(fairness=FAIRNESS[1])
    queue = FlowQueue(FlowSettings(default_priority_band=turns, default_negative_priority_band=turns))
    requests = [(waiting(flow, priority), leaves) for priority, flow, leaves in asked]
    for one, _ in requests:
        assert queue.put(one)
    for one, leaves in requests:
        if leaves:
            queue.remove(one)
            queue.remove(one)
    assert len(queue) == sum(not leaves for _, leaves in requests)
    served = drained(queue)
    assert sorted(one.sequence for one in served) == [one.sequence for one, leaves in requests if not leaves]
    assert [one.priority for one in served] == sorted((one.priority for one in served), reverse=True)
    assert (len(queue), queue.size_bytes) == (0, 0)


def test_detectors_compute_saturation_as_llm_d_does() -> None:
    """Saturation is the mean of the greater of queue and cache (stale pods: 1), or the share in flight."""
    pods = np.zeros(2, POD)
    pods["waiting"], pods["kv_usage"], pods["scraped_s"] = [5.0, 0.0], [0.0, 0.4], [0.0, 0.0]
    assert UtilizationDetector().saturation(pods, 0, 0.1) == pytest.approx(0.75)
    assert UtilizationDetector().saturation(pods, 0, 0.3) == 1.0
    pods["awaiting"], pods["decoding"], pods["held_tokens"] = [1, 0], [0, 2], [600, 0]
    detectors = [ConcurrencyDetector(4, 1000, mode) for mode in ("requests", "tokens", "hybrid")]
    assert [one.saturation(pods, 1, 0.0) for one in detectors] == pytest.approx([0.5, 0.3, 0.5])


class Gate:
    """Flow control with a capacity of one request per pod, and requests on threads.

    Attributes:
        now_s: Time of its clock, in seconds.
        order: Ids of the dispatched requests.
    """

    def __init__(self, settings: FlowSettings, *, pods: int = 1) -> None:
        self.now_s = 0.0
        self.order: list[str] = []
        self.registry = CollectorRegistry()
        self.pods = PodSet()
        self.pods.declare([ready_pod(f"10.0.0.{n + 1}:1").entry for n in range(pods)])
        for n in range(pods):
            self.pods.put(ready_pod(f"10.0.0.{n + 1}:1"))
        self.flow = FlowControl(
            settings,
            1.0,
            ConcurrencyDetector(1),
            self.pods,
            self.registry,
            priority_of=lambda headers: int(headers.get("priority", 0)),
            clock=lambda: self.now_s,
        )
        self._threads = ThreadPoolExecutor(16)
        self._ends: dict[str, threading.Event] = {}

    def ask(self, name: str, is_active: Callable[[], bool] | None = None, **known: Any) -> Future[None]:
        """Submit a request that stays pending until `end`."""
        self._ends[name] = threading.Event()
        return self._threads.submit(self._go, name, is_active, known)

    def end(self, name: str) -> None:
        """End a request."""
        self._ends[name].set()

    def close(self) -> None:
        """Close flow control and end all requests."""
        self.flow.close()
        for end in self._ends.values():
            end.set()
        self._threads.shutdown()

    def _go(self, name: str, is_active: Callable[[], bool] | None, known: dict[str, Any]) -> None:
        with self.flow.admit(RouteRequest(name, RequestKind.PASSTHROUGH, **known), is_active):
            self.order.append(name)
            self._ends[name].wait(300)


@contextmanager
def gate(settings: FlowSettings | None = None, **known: Any) -> Iterator[Gate]:
    """Yield a running gate."""
    made = Gate(settings or FlowSettings(), **known)
    made.flow.start()
    try:
        yield made
    finally:
        made.close()


def rejection(asked: Future[None]) -> tuple[int, str | None]:
    """Return the status and reason with which a request was rejected."""
    with pytest.raises(RequestError) as caught:
        asked.result(300)
    return caught.value.status, caught.value.dropped_reason


def test_queued_requests_are_dispatched_one_by_one_by_priority() -> None:
    """With a capacity of one, further requests are queued and the highest priority is dispatched next."""
    with gate() as one:
        one.ask("first")
        wait_until(lambda: one.order == ["first"], "first request dispatched")
        for place, (name, priority) in enumerate((("low", "0"), ("high", "3")), 1):
            one.ask(name, headers={"priority": priority})
            wait_until(lambda place=place: len(one.flow) == place, "request queued")
        one.end("first")
        wait_until(lambda: one.order == ["first", "high"], "second request dispatched")
        one.end("high")
        wait_until(lambda: one.order == ["first", "high", "low"], "third request dispatched")
        waits = "llm_d_epp_flow_control_request_queue_duration_seconds_count"
        dispatched = {"outcome": "Dispatched"}
        counts = {
            name: one.registry.get_sample_value(waits, {"priority": name, **dispatched}) for name in "03"
        }
        assert counts == {"0": 2.0, "3": 1.0}


def test_saturation_is_that_of_the_fullest_stage() -> None:
    """With separate prefill pods, idle decode pods do not lower saturation; pods without a role decode."""
    with gate() as one:
        prefill = "10.0.0.7:1"
        pod = replace(ready_pod(prefill), entry=entry(prefill, **{"llm-d.ai/role": "prefill"}))
        decode = ready_pod("10.0.0.1:1")
        one.pods.declare([decode.entry, pod.entry])
        one.pods.put(pod)
        assert one.flow.saturation() == 0.0
        ticket = one.pods.load_table.begin(prefill, 10, 0.0)
        assert one.flow.saturation() == 1.0
        one.pods.load_table.end(prefill, ticket, 10, 0.0)
        one.pods.load_table.begin(decode.address, 10, 0.0)
        assert one.flow.saturation() == 1.0


def test_a_queued_request_expires() -> None:
    """An expired request gets 429; without ready pods it gets 503 after the no-endpoint time to live."""
    with gate(FlowSettings(ttl_s=5.0)) as one:
        one.ask("first")
        wait_until(lambda: one.order == ["first"], "first request dispatched")
        asked = one.ask("second")
        wait_until(lambda: len(one.flow) == 1, "request queued")
        one.now_s = 5.0
        assert rejection(asked) == (429, "rejected-ttl-expired")
    with gate(FlowSettings(ttl_s=60.0, no_endpoint_ttl_s=2.0), pods=0) as none:
        asked = none.ask("only")
        wait_until(lambda: len(none.flow) == 1, "request queued")
        none.now_s = 2.0
        assert rejection(asked) == (503, "rejected-no-endpoints")


def test_a_new_pod_receives_queued_requests() -> None:
    """Requests that arrived while there was no pod are dispatched to the first one."""
    with gate(pods=0) as one:
        one.ask("early")
        wait_until(lambda: len(one.flow) == 1, "request queued")
        pod = ready_pod("10.0.0.9:1")
        one.pods.declare([pod.entry])
        one.pods.put(pod)
        wait_until(lambda: one.order == ["early"], "early request dispatched")


def test_disconnect_full_queue_and_shutdown_have_their_own_reasons() -> None:
    """A disconnect, a full queue and a shutdown have their own reasons and leave the queue empty."""
    connected = threading.Event()
    connected.set()
    with gate(FlowSettings(requests_max=1)) as one:
        one.ask("first")
        wait_until(lambda: one.order == ["first"], "first request dispatched")
        asked = one.ask("second", connected.is_set)
        wait_until(lambda: len(one.flow) == 1, "request queued")
        assert rejection(one.ask("third")) == (429, "rejected-saturated")
        connected.clear()
        assert rejection(asked) == (503, "rejected-context-cancelled")
        last = one.ask("fourth")
        wait_until(lambda: len(one.flow) == 1, "request queued")
        one.flow.close()
        assert rejection(last) == rejection(one.ask("fifth")) == (503, "rejected-shutting-down")
        assert (len(one.flow), one.flow.size_bytes) == (0, 0)


def flow(section: dict[str, Any], *plugins: dict[str, Any]) -> Any:
    """Return the flow settings of a configuration with this flowControl section."""
    config = {
        "apiVersion": "llm-d.ai/v1alpha1",
        "kind": "EndpointPickerConfig",
        "featureGates": ["flowControl"],
        "plugins": list(plugins),
        "flowControl": section,
    }
    return read_flow_settings(parse_config(yaml.safe_dump(config), "c.yaml"), 1.0)


def test_the_flow_control_section_is_read() -> None:
    """Bands, quantities, durations, ceiling and detector are read; missing values have llm-d's defaults."""
    settings, ceiling, detector = flow(
        {
            "maxBytes": "1Gi",
            "maxRequests": "2k",
            "defaultRequestTTL": "1m",
            "usageLimitPolicyPluginRef": "limit",
            "saturationDetector": {"pluginRef": "utilization-detector"},
            "priorityBands": [
                {"priority": -5, "maxRequests": 7, "fairnessPolicyRef": "rr", "orderingPolicyRef": EDF}
            ],
        },
        {"type": "static-usage-limit-policy", "name": "limit", "parameters": {"threshold": 0.9}},
        {"type": "round-robin-fairness-policy", "name": "rr"},
        {"type": "utilization-detector", "parameters": {"queueDepthThreshold": 9}},
    )
    assert (settings.bytes_max, settings.requests_max, settings.ttl_s) == (1 << 30, 2000, 60.0)
    assert (settings.no_endpoint_ttl_s, ceiling) == (None, 0.9)
    assert settings.priority_bands == (BandSettings(-5, 7, 1_000_000_000, EDF, FAIRNESS[1]),)
    assert settings.default_priority_band == BandSettings(0, 5000, 1_000_000_000, FCFS, FAIRNESS[0])
    assert detector == UtilizationDetector(9.0, 0.8, 3.0)


def test_agent_identity_makes_the_agent_session_the_fairness_id() -> None:
    """The agent's session id is the fairness id only if agent-identity is configured."""
    base = {"apiVersion": "llm-d.ai/v1alpha1", "kind": "EndpointPickerConfig"}
    headers = {"session-id": "s", "x-claude-code-session-id": "c"}
    for plugins, expected in (([{"type": "agent-identity"}], "c"), ([], "")):
        config = parse_config(yaml.safe_dump(base | {"plugins": plugins}), "c.yaml")
        assert fairness_id_reader(config)(headers) == expected


@pytest.mark.parametrize(
    ("section", "complaint"),
    [
        ({"enableEviction": "maybe"}, "flowControl.enableEviction: must be true or false"),
        ({"maxRequests": "0"}, "flowControl.maxRequests: must be an integer above 0"),
        (
            {"priorityBands": [{"orderingPolicyRef": "lifo"}]},
            r"priorityBands\[0\].orderingPolicyRef: expected one of .*, got 'lifo'",
        ),
        ({"priorityBands": [{}, {}]}, r"priorityBands\[1\].priority: duplicate band: 0"),
        (
            {"usageLimitPolicyPluginRef": "x"},
            "expected the name of a static-usage-limit-policy plugin, got 'x'",
        ),
        ({"maxWaiters": 1}, "flowControl.maxWaiters: unknown field"),
    ],
)
def test_an_invalid_section_is_rejected_with_its_line(section: dict[str, Any], complaint: str) -> None:
    """The error of an invalid section names file, line and field."""
    with pytest.raises(ConfigError, match=rf"c\.yaml:\d+: .*{complaint}"):
        flow(section)
