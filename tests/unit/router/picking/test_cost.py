"""Cost model: queue, prefill, copies, KV cache pressure, and cache hits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.wire.tiers import Tiers
from router.picking.cost import CACHE_HIT, CostParameters, add_hits
from tests.support.router.pricing import IDLE, PodState, Queued, costs_on, load

POD = st.builds(
    PodState,
    cached_tokens=st.integers(0, 1000),
    queue=st.lists(st.builds(Queued, tokens=st.integers(0, 10_000)), max_size=5),
    decoding=st.integers(0, 20),
    load=st.none()
    | st.builds(
        load,
        waiting=st.integers(0, 50),
        running=st.integers(0, 50),
        kv_usage=st.floats(0, 1),
        kv_capacity_tokens=st.none() | st.integers(1, 10**6),
    ),
    tokens_per_s=st.floats(10, 1e6),
)


def test_cost_is_queue_plus_weighted_own_prefill() -> None:
    """With one queued request of 500 tokens, a = 2: 0.5 s of queue and twice 0.6 s of own prefill."""
    found = costs_on(1000, replace(IDLE, cached_tokens=400, queue=[Queued(500)]))
    assert found.part("own_weight") == [2.0]
    assert found.part("queued_prefill_s") == [0.5]
    assert found.part("own_prefill_s") == [0.6]
    assert found.part("cost_s") == [pytest.approx(0.5 + 2 * 0.6)]


def test_the_weight_counts_the_mean_queue_and_is_capped() -> None:
    """`a` is 1 + the mean number of awaiting requests per pod, at most 17."""
    assert costs_on(1, replace(IDLE, queue=[Queued(0)] * 4), IDLE).part("own_weight") == [3.0, 3.0]
    assert costs_on(1, replace(IDLE, queue=[Queued(0)] * 500)).part("own_weight") == [17.0]


def test_host_tier_tokens_cost_their_copy() -> None:
    """A host tier block costs more than a device block and less than computing it."""
    parameters = CostParameters(copy_tokens_per_s=10_000.0)
    on_device = replace(IDLE, cached_tokens=512)
    on_host = replace(on_device, host_tokens=512)
    costs = costs_on(1024, on_device, on_host, IDLE, parameters=parameters).part("cost_s")
    assert costs == sorted(costs)
    assert costs[1] - costs[0] == pytest.approx(512 / 10_000)


def test_a_nearly_full_kv_cache_costs_the_prefill_that_preemption_discards() -> None:
    """Tokens above 90 % of the KV cache capacity cost their prefill; below that they cost nothing."""
    pod = replace(IDLE, load=load(kv_usage=0.8, kv_capacity_tokens=1000))
    assert costs_on(100, pod).part("kv_pressure_s") == [0.0]
    assert costs_on(300, pod).part("kv_pressure_s") == [pytest.approx(0.2)]


@pytest.mark.parametrize("host_tokens", [0, 100])
def test_cached_blocks_count_towards_kv_pressure(host_tokens: int) -> None:
    """A cache hit on a full pod loses to a slightly smaller hit on a pod with free KV cache.

    Cached blocks are evictable, or in the host tier, until a request uses them; then they are pinned.
    """
    full = PodState(100, host_tokens, load=load(kv_usage=0.8, kv_capacity_tokens=1000))
    roomy = replace(full, cached_tokens=80, host_tokens=0, load=load(kv_capacity_tokens=1000))
    found = costs_on(200, full, roomy)
    assert found.part("kv_pressure_s") == [pytest.approx(0.1), 0.0]
    assert found.best == 1
    assert costs_on(100, full, roomy).best == 0


def test_stale_engine_metrics_are_ignored() -> None:
    """After 5 s neither KV cache usage nor other clients' queue counts; the age is reported."""
    pod = replace(IDLE, load=load(waiting=9, kv_usage=1.0, kv_capacity_tokens=1000))
    fresh, old = costs_on(100, pod, now_s=5.0), costs_on(100, pod, now_s=5.1)
    assert fresh.part("kv_pressure_s")[0] > 0.0 < fresh.part("queued_prefill_s")[0]
    assert old.part("kv_pressure_s") == old.part("queued_prefill_s") == [0.0]
    assert old.part("load_age_s") == [5.1]
    assert costs_on(100, IDLE).part("load_age_s") == [float("inf")]


def test_foreign_queued_requests_cost_an_average_prefill() -> None:
    """Each queued request of other clients costs the prefill of an average request (100 tokens)."""
    pod = replace(IDLE, load=load(waiting=3))
    assert costs_on(100, pod).part("queued_prefill_s") == [pytest.approx(0.3)]
    found = costs_on(100, replace(IDLE, queue=[Queued(100)]))
    found.load_table.scraped("a:0", load(waiting=3))
    assert found.load_table.pods["foreign_waiting"].max() == 2.0


def test_decoding_requests_change_a_pick() -> None:
    """A pod with a cache hit loses if 50 decoding requests slow its prefill by 40 %."""
    busy = PodState(cached_tokens=100, decoding=50)
    assert costs_on(1000, busy, IDLE, parameters=CostParameters(decode_slowdown=0.0)).best == 0
    found = costs_on(1000, busy, IDLE)
    assert found.best == 1
    assert found.part("slowdown") == [pytest.approx(1.4), 1.0]


def test_foreign_decoding_requests_slow_the_prefill() -> None:
    """Running requests of other clients slow the prefill as much as those of this router."""
    assert costs_on(1000, PodState(load=load(running=50)), IDLE).part("slowdown") == [pytest.approx(1.4), 1.0]


def test_a_running_prefills_elapsed_time_changes_a_pick() -> None:
    """Half of the elapsed time of the running prefill is subtracted from the queue."""
    began, fresh = PodState(queue=[Queued(2000, sent_s=0.0)]), PodState(queue=[Queued(1800, sent_s=1.0)])
    assert costs_on(100, began, fresh, now_s=1.0, parameters=CostParameters(elapsed_share=0.0)).best == 1
    found = costs_on(100, began, fresh, now_s=1.0)
    assert found.best == 0
    assert found.part("queued_prefill_s") == [pytest.approx(1.5), pytest.approx(1.8)]


def test_a_late_prefill_does_not_shorten_the_queue_behind_it() -> None:
    """If the running prefill is late, the queue is half of it plus all requests behind it."""
    found = costs_on(100, PodState(queue=[Queued(1000), Queued(700)]), now_s=1.7)
    assert found.part("queued_prefill_s") == [pytest.approx(0.5 + 0.7)]


def test_an_overdue_queue_changes_a_pick() -> None:
    """An overdue queue is extended by half of its delay, at most by 1 s, so that another pod wins."""
    late, busy = PodState(queue=[Queued(20)]), PodState(queue=[Queued(200, sent_s=0.5)])
    assert costs_on(100, late, replace(busy, queue=[Queued(200)])).best == 0
    found = costs_on(100, late, busy, now_s=0.52)
    assert found.best == 1
    assert found.part("queued_prefill_s")[0] == pytest.approx(0.01 + 0.25)
    for now_s, overdue_s in ((0.02, 0.0), (1.02, 0.5), (2.02, 1.0), (50.0, 1.0)):
        queued_s = costs_on(100, late, now_s=now_s).part("queued_prefill_s")
        assert queued_s == [pytest.approx(0.01 + overdue_s)]


def test_an_empty_queue_is_never_overdue() -> None:
    """A pod without queued requests has no queue time, however long ago its last prefill ended."""
    assert costs_on(100, replace(IDLE, decoding=1), now_s=100.0).part("queued_prefill_s") == [0.0]


def test_extra_seconds_are_added_to_the_cost() -> None:
    """Extra seconds are added to the cost unweighted, whatever their sign."""
    plain, moved = costs_on(100, IDLE, IDLE), costs_on(100, IDLE, IDLE, extra_s=[0.5, -0.25])
    assert moved.part("extra_s") == [0.5, -0.25]
    assert np.subtract(moved.part("cost_s"), plain.part("cost_s")).tolist() == [0.5, -0.25]


@given(st.lists(POD, min_size=1, max_size=6), st.integers(1000, 100_000), st.floats(0, 10))
def test_a_smaller_cache_hit_or_a_longer_queue_never_lowers_the_cost(
    pods: list[PodState], tokens: int, now_s: float
) -> None:
    """A smaller cache hit or a longer queue never lowers the cost, and every cost is finite."""
    pods = [_with_stale_metrics(pod) for pod in pods]
    worse = [
        replace(pod, cached_tokens=pod.cached_tokens // 2, queue=[*pod.queue, Queued(1)]) for pod in pods
    ]
    before, after = costs_on(tokens, *pods, now_s=now_s), costs_on(tokens, *worse, now_s=now_s)
    for lower, higher in zip(before.part("cost_s"), after.part("cost_s"), strict=True):
        assert 0.0 <= lower <= higher * (1 + 1e-9) < float("inf")


@given(st.lists(POD, min_size=1, max_size=6), st.integers(1000, 100_000), st.floats(0, 10))
def test_more_decoding_requests_never_lower_the_cost(pods: list[PodState], tokens: int, now_s: float) -> None:
    """One more decoding request never lowers the cost of a pod."""
    pods = [_with_stale_metrics(pod) for pod in pods]
    worse = [replace(pod, decoding=pod.decoding + 1) for pod in pods]
    costs = costs_on(tokens, *pods, now_s=now_s).part("cost_s")
    higher_costs = costs_on(tokens, *worse, now_s=now_s).part("cost_s")
    for lower, higher in zip(costs, higher_costs, strict=True):
        assert 0.0 <= lower <= higher * (1 + 1e-9) < float("inf")


def _with_stale_metrics(pod: PodState) -> PodState:
    """Return the pod with metrics too old to count, so that requests of other clients play no part."""
    return replace(pod, load=pod.load and replace(pod.load, scraped_s=-100.0))


@pytest.mark.parametrize(
    ("length", "blocks", "by_tier", "hit"),
    [
        (65, 4, {"gpu": 4}, (64, 0)),
        (64, 4, {"gpu": 4}, (48, 0)),
        (200, 4, {"gpu": 1, "speculative": 2, "cpu": 1}, (64, 16)),
        (64, 4, {"gpu": 3, "cpu": 1}, (48, 0)),
        (5, 0, {}, (0, 0)),
        (0, 0, {}, (0, 0)),
    ],
)
def test_hit_is_what_an_engine_can_serve(
    length: int, blocks: int, by_tier: dict[str, int], hit: tuple[int, int]
) -> None:
    """A hit is whole blocks without the last token; device and speculative blocks need no copy."""
    tiers = Tiers()
    counts = np.zeros((1, len(tiers.names)), np.int32)
    for tier, count in by_tier.items():
        counts[0, tiers.number(tier)] = count
    hits = np.zeros(1, CACHE_HIT)
    device = np.array([tiers.number("gpu"), tiers.number("speculative")])
    strides = np.zeros(0, np.int32)
    add_hits(np.array([blocks], np.int32), counts, strides, device, np.zeros(1, np.int64), length, 16, hits)
    assert tuple(hits[0].tolist()) == hit


def test_hit_is_whole_engine_blocks() -> None:
    """If an engine block is three index blocks, a partially matched engine block is not served."""
    hits = np.zeros(1, CACHE_HIT)
    strides = np.full(1, 3, np.int32)
    blocks, counts = np.full(1, 5, np.int32), np.full((1, 1), 5, np.int32)
    row = np.zeros(1, np.int64)
    add_hits(blocks, counts, strides, np.zeros(1, np.int64), row, 1_000, 16, hits)
    assert tuple(hits[0].tolist()) == (48, 0)
