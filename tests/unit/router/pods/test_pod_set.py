"""Pod set, candidates of a request, and evaluation of probes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from random import Random

import msgspec
import pytest

from indexer.pod_entry import EVENTS_PORT_LABEL, MODEL_LABEL, RANKS_LABEL, EventDefaults
from router.errors import NoEndpointError, RequestError
from router.picking.candidates import ASLEEP, select_candidates
from router.pods.pod_set import NOT_READY_THERE, NOT_REPORTED, EventSources, Pod, PodSet
from router.pods.probe import ProbeResult, served_models
from router.pods.watch import judge, next_probe_s, pod_stream
from tests.support.router.bench import TINY, completion, entry, ready_pod
from tests.support.router.pricing import load

ONE, TWO = ready_pod("10.0.0.1:8000"), ready_pod("10.0.0.2:8000")
UNKNOWN = replace(ready_pod("10.0.0.3:8000"), models=None)
DOWN = replace(TWO, ready=False, why="/health answered 503")


def pod_set(*pods: Pod) -> PodSet:
    """Return a pod set with these pods."""
    known = PodSet()
    known.declare([pod.entry for pod in pods])
    for pod in pods:
        known.put(pod)
    return known


def addresses(*pods: Pod, model: str = TINY, allowed: frozenset[str] | None = None) -> list[str]:
    """Return the candidates of a request."""
    request = msgspec.structs.replace(completion("id", "p", model=model), candidates=allowed)
    return [pod.address for pod in select_candidates(request, pod_set(*pods)).pods]


def test_only_ready_pods_are_candidates() -> None:
    """A pod that is not ready receives no requests, and the reason is kept for explain."""
    candidates = select_candidates(completion("id", "p"), pod_set(ONE, DOWN))
    assert [pod.address for pod in candidates.pods] == [ONE.address]
    assert candidates.excluded == {TWO.address: "not ready: /health answered 503"}


def test_without_ready_pods_silent_ones_are_tried() -> None:
    """If no pod is ready, pods that only timed out are candidates."""
    pods = pod_set(ONE, TWO)
    pods.suspect(ONE.address, "its link broke")
    assert _candidates(pods) == [TWO.address]
    pods.suspect(TWO.address, "its link broke")
    assert _candidates(pods) == [ONE.address, TWO.address]
    late = ProbeResult(ONE.address, False, timed_out=True, why="late")
    pods.put(judge(pods.current[ONE.address], late))
    pods.put(judge(pods.current[TWO.address], ProbeResult(TWO.address, False, why="refused")))
    assert _candidates(pods) == [ONE.address]
    pods.put(judge(pods.current[TWO.address], ProbeResult(TWO.address, True)))
    assert _candidates(pods) == [TWO.address]


def test_pods_that_failed_otherwise_are_not_tried() -> None:
    """A pod that was never ready, is unhealthy or terminates is no candidate."""
    late = ProbeResult(ONE.address, False, timed_out=True, why="late")
    unknown = judge(Pod(ONE.address, "one", ONE.entry), late)
    unhealthy = judge(judge(ONE, ProbeResult(ONE.address, False, why="/health answered 503")), late)
    ending = pod_set(ONE)
    ending.suspect(ONE.address, "its link broke")
    ending.declare([replace(ONE.entry, ready=False)])
    for pods in (pod_set(unknown), pod_set(unhealthy), ending):
        with pytest.raises(NoEndpointError):
            _candidates(pods)


def test_a_sleeping_pod_is_used_only_if_all_sleep() -> None:
    """A sleeping pod is a candidate only if no awake pod serves the model."""
    pods = pod_set(ONE, TWO)
    for pod in (ONE, TWO):
        pods.put(judge(pods.current[pod.address], ProbeResult(pod.address, True, asleep=pod is ONE)))
    generation = pods.generation
    assert _candidates(pods) == [TWO.address]
    assert select_candidates(completion("r", "hi"), pods).excluded == {ONE.address: ASLEEP}
    assert [pod.takes_requests for pod in pods.current.values()] == [False, True]
    pods.put(judge(pods.current[ONE.address], ProbeResult(ONE.address, True)))
    assert _candidates(pods) == [TWO.address], "a page that could not be read wakes nobody"
    pods.put(judge(pods.current[TWO.address], ProbeResult(TWO.address, True, asleep=True)))
    assert _candidates(pods) == [ONE.address, TWO.address]
    pods.put(judge(pods.current[ONE.address], ProbeResult(ONE.address, True, asleep=False)))
    assert _candidates(pods) == [ONE.address]
    assert pods.generation == generation + 2


def test_sleeping_pods_are_compared_within_the_candidates() -> None:
    """If all pods of the model, or all that the gateway allows, sleep, one of them is picked."""
    other = ready_pod("10.0.0.3:8000", model="other")
    pods = pod_set(replace(ONE, asleep=True), TWO, other)
    only = msgspec.structs.replace(completion("r", "hi"), candidates=frozenset({ONE.address}))
    assert [pod.address for pod in select_candidates(only, pods).pods] == [ONE.address]
    pods.put(replace(TWO, asleep=True))
    assert _candidates(pods) == [ONE.address, TWO.address]


def test_without_a_ready_pod_the_error_is_503() -> None:
    """Without a ready pod the request fails with 503 and the dropped reason rejected-no-endpoints."""
    with pytest.raises(NoEndpointError) as caught:
        addresses(DOWN)
    assert (caught.value.status, caught.value.dropped_reason) == (503, "rejected-no-endpoints")


def test_an_unknown_model_is_404() -> None:
    """If all ready pods have reported their models, an unknown model gives 404."""
    with pytest.raises(RequestError) as caught:
        addresses(ONE, TWO, model="gpt-9")
    assert (caught.value.status, caught.value.param) == (404, "model")
    assert caught.value.error_type == "NotFoundError"


def test_a_pod_without_reported_models_may_serve_any() -> None:
    """A pod that has not reported its models is a candidate for every model."""
    assert addresses(ONE, UNKNOWN, model="gpt-9") == [UNKNOWN.address]
    assert addresses(ONE, UNKNOWN) == [ONE.address, UNKNOWN.address]


def test_an_oversized_model_name_is_rejected() -> None:
    """A model name above the limit gives 404, and the error quotes only its beginning."""
    with pytest.raises(RequestError) as caught:
        addresses(ONE, UNKNOWN, model="x" * 1_000_000)
    assert (caught.value.status, caught.value.param) == (404, "model")
    assert len(caught.value.body()) < 1000
    assert addresses(UNKNOWN, model="/models/" + "x" * 4000) == [UNKNOWN.address]


def test_an_adapter_is_served_by_pods_that_loaded_it() -> None:
    """A LoRA adapter's name selects its pods, and its keys start from the base model."""
    tuned = ready_pod("10.0.0.4:8000", adapters=["sql"])
    candidates = select_candidates(completion("id", "p", model="sql"), pod_set(ONE, tuned))
    assert [pod.address for pod in candidates.pods] == [tuned.address]
    assert (candidates.base_model, candidates.lora_name) == (TINY, "sql")


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        (None, [ONE.address, TWO.address]),
        (frozenset({"10.0.0.2:8000"}), [TWO.address]),
        (frozenset({"10.0.0.2"}), [TWO.address]),
        (frozenset({"10.0.0.2:8000", "10.0.0.9:1"}), [TWO.address]),
    ],
)
def test_the_gateways_subset_is_matched_by_address(
    allowed: frozenset[str] | None, expected: list[str]
) -> None:
    """A subset names pods by "ip:port" or ip; unknown names are ignored."""
    assert addresses(ONE, TWO, allowed=allowed) == expected


@pytest.mark.parametrize("allowed", [frozenset(), frozenset({"10.0.0.2:8001"})])
def test_a_subset_without_ready_pods_is_503(allowed: frozenset[str]) -> None:
    """An empty subset, or one of unknown pods, gives 503."""
    with pytest.raises(NoEndpointError):
        addresses(ONE, TWO, allowed=allowed)


def test_a_declaration_keeps_known_pods() -> None:
    """A pod that stays declared keeps its state, also with changed labels; removed pods disappear."""
    pods = pod_set(ONE, TWO)
    before = pods.current
    labelled = entry("10.0.0.2:8000", role="decode")
    assert pods.declare([ONE.entry, labelled]) == []
    assert pods.current[ONE.address] is ONE
    assert pods.current[TWO.address] == replace(TWO, entry=labelled)
    pods.declare([TWO.entry])
    assert list(pods.current) == [TWO.address]
    assert before == {ONE.address: ONE, TWO.address: TWO}


@pytest.mark.parametrize("change", [{"epoch": "2"}, {"name": "other"}, {"namespace": "other"}])
def test_another_epoch_at_the_same_address_is_a_new_pod(change: dict[str, str]) -> None:
    """Another pod or process at an address is not ready before a probe, and is returned as new."""
    told = load(waiting=3, kv_usage=0.5, kv_capacity_tokens=100, prefill_tokens_per_s=20.0)
    pods = pod_set(replace(ONE, load=told), TWO)
    pods.load_table.set_observed({ONE.address: 30.0}, 1000.0)
    pods.load_table.begin(ONE.address, 7, 0.0)
    assert pods.declare([replace(ONE.entry, **change), TWO.entry]) == [ONE.address]
    # Values reported by or observed at the engine are reset; requests sent there are kept.
    known = pods.load_table.pods[pods.load_table.rows([ONE.address])[0]]
    assert [known[name] for name in ("waiting", "kv_usage", "kv_capacity_tokens", "scraped_s")] == [
        *(0.0, 0.0, 0.0),
        -math.inf,
    ]
    assert pods.load_table.prefill_tokens_per_s(ONE.address) == 1000.0
    assert pods.load_table.work(ONE.address).awaiting_tokens == 7
    assert not pods.current[ONE.address].ready
    assert pods.current[TWO.address].ready


def test_declared_readiness_applies_at_once() -> None:
    """A pod declared as not ready is removed from candidates at once, and returns when declared as ready."""
    pods = pod_set(ONE, DOWN)
    out = [replace(pod.entry, ready=False) for pod in (ONE, DOWN)]
    pods.declare(out)
    assert {pod.why for pod in pods.current.values()} == {NOT_READY_THERE, DOWN.why}
    healthy = judge(pods.current[ONE.address], ProbeResult(ONE.address, True))
    assert (healthy.ready, healthy.why) == (False, NOT_READY_THERE)
    pods.declare([ONE.entry, DOWN.entry])
    assert [pod.ready for pod in pods.current.values()] == [True, False]


def test_declared_event_ports_override_reported_ones() -> None:
    """Annotated ports override those reported by the engine, and both override the defaults."""
    defaults = EventDefaults(port=1, replay_port=2, asks_engine=True)
    pod = replace(ONE, entry=replace(ONE.entry, events=defaults))
    told = EventSources(reported=True, labels={EVENTS_PORT_LABEL: "3", RANKS_LABEL: "2"})
    off = EventSources(reported=True, off=True)
    annotated = replace(pod.entry, labels={EVENTS_PORT_LABEL: "4"})

    def followed(pod: Pod) -> tuple[str | None, str | None, int] | None:
        stream = pod_stream(pod)
        return stream and (stream.events_endpoint, stream.replay_endpoint, stream.ranks)

    assert followed(pod) == ("tcp://10.0.0.1:1", "tcp://10.0.0.1:2", 1)
    assert followed(replace(pod, sources=NOT_REPORTED)) == ("tcp://10.0.0.1:1", "tcp://10.0.0.1:2", 1)
    assert followed(replace(pod, sources=told)) == ("tcp://10.0.0.1:3", None, 2)
    assert followed(replace(pod, sources=told, entry=annotated)) == ("tcp://10.0.0.1:4", None, 2)
    assert followed(replace(pod, sources=off)) is None
    assert followed(replace(pod, sources=off, entry=annotated)) == ("tcp://10.0.0.1:4", None, 1)


def test_a_late_probe_does_not_restore_a_removed_pod() -> None:
    """A probe result of an undeclared pod is dropped."""
    pods = pod_set(ONE)
    pods.put(TWO)
    assert list(pods.current) == [ONE.address]


def test_a_suspected_pod_is_not_ready_at_once() -> None:
    """A suspicion makes a ready pod not ready, and does not change others."""
    pods = pod_set(ONE, DOWN)
    assert pods.suspect(ONE.address, "its link broke") == ONE
    assert pods.current[ONE.address].why == "its link broke"
    assert pods.suspect(DOWN.address, "again") is None
    assert pods.suspect("10.0.0.9:1", "stranger") is None


def test_a_healthy_probe_makes_a_pod_ready() -> None:
    """One healthy probe makes a pod ready; models reported earlier are kept if not requested again."""
    judged = judge(replace(ONE, ready=False, failures=2), ProbeResult(ONE.address, True))
    assert (judged.ready, judged.why, judged.failures, judged.models) == (True, "", 0, ONE.models)


def test_three_probes_without_load_hide_the_load() -> None:
    """Three consecutive probes without a load mark it as unknown; a load, or a failed pod, ends that."""
    mute = ProbeResult(ONE.address, True, why_no_load="/metrics answered 404")
    seen = [ONE]
    for _ in range(3):
        seen.append(judge(seen[-1], mute))
    assert [pod.hides_load for pod in seen] == [False, False, False, True]
    assert not judge(seen[-1], ProbeResult(ONE.address, True, load=load())).hides_load
    assert not judge(seen[-1], ProbeResult(ONE.address, False, why="refused")).hides_load


@pytest.mark.parametrize("seed", range(5))
def test_probes_are_spread_about_their_interval(seed: int) -> None:
    """The next probe follows after 80 to 120 % of the interval, rounded up to 0.1 s."""
    random = Random(seed)
    waits_s = [next_probe_s(100.0, 10.0, random) - 100.0 for _ in range(1000)]
    assert min(waits_s) == pytest.approx(8.0, abs=0.2)
    assert max(waits_s) == pytest.approx(12.0, abs=0.2)
    assert len({round(wait_s, 6) for wait_s in waits_s}) <= 42


def test_a_failed_probe_makes_a_pod_not_ready_at_once() -> None:
    """A refused connection or an error status makes a pod not ready."""
    judged = judge(ONE, ProbeResult(ONE.address, False, why="refused"))
    assert (judged.ready, judged.why) == (False, "refused")


def test_only_repeated_timeouts_make_a_pod_not_ready() -> None:
    """A ready pod may time out twice, not three times; a pod that was never ready stays not ready."""
    late = ProbeResult(ONE.address, False, timed_out=True, why="late")
    first = judge(ONE, late)
    second = judge(first, late)
    assert [first.ready, second.ready, judge(second, late).ready] == [True, True, False]
    assert not judge(replace(ONE, ready=False), late).ready


def test_a_stream_needs_the_base_model() -> None:
    """The declared model is used until the pod reports its own; without either no stream is followed."""
    labels = {MODEL_LABEL: "declared", EVENTS_PORT_LABEL: "7777"}
    declared = Pod("10.0.0.1:8000", "pod", entry("10.0.0.1:8000", **labels))
    stream = pod_stream(declared)
    assert stream is not None
    assert (stream.model, stream.events_endpoint) == ("declared", "tcp://10.0.0.1:7777")
    told = pod_stream(replace(declared, models=ONE.models))
    assert told is not None
    assert (told.model, told.events_endpoint) == (TINY, "tcp://10.0.0.1:7777")
    assert pod_stream(replace(declared, entry=entry("10.0.0.1:8000"))) is None


@pytest.mark.parametrize(
    "page", [b"", b"{}", b'{"data":[]}', b'{"data":[{"id":"a","parent":"b"}]}', b"[" * 9999, b"\xff"]
)
def test_a_models_page_without_a_base_model_is_ignored(page: bytes) -> None:
    """Invalid pages and pages without a base model give None."""
    assert served_models(page) is None


def test_a_models_page_lists_base_aliases_and_adapters() -> None:
    """Cards without a parent are names of the base model, the first its own; others are adapters."""
    cards = [{"id": "m", "max_model_len": 99, "root": "/m"}, {"id": "alias", "parent": None}]
    models = served_models(json.dumps({"data": [*cards, {"id": "sql", "parent": "m"}]}).encode())
    assert models is not None
    assert (models.base, models.aliases, models.adapters, models.max_model_len) == (
        "m",
        {"m", "alias"},
        {"sql"},
        99,
    )


def _candidates(pods: PodSet) -> list[str]:
    return [pod.address for pod in select_candidates(completion("id", "p"), pods).pods]
