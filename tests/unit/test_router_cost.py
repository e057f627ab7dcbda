"""The price of a pod."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.tiers import Tiers
from router.picking.cost import CREDIT, CostParameters, add_credit
from tests.unit.pricing_support import IDLE, Known, Queued, load, priced

POD = st.builds(
    Known,
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


def test_the_cost_is_queue_plus_weighted_own_prefill() -> None:
    """With one queued request of 500 tokens, a = 2: 0.5 s of queue and twice 0.6 s of own prefill."""
    found = priced(1000, replace(IDLE, cached_tokens=400, queue=[Queued(500)]))
    assert found.part("own_weight") == [2.0]
    assert found.part("queued_prefill_s") == [0.5]
    assert found.part("own_prefill_s") == [0.6]
    assert found.part("cost_s") == [pytest.approx(0.5 + 2 * 0.6)]


def test_the_weight_counts_the_mean_queue_and_is_capped() -> None:
    """`a` is 1 + the mean number awaiting per pod, at most 17."""
    assert priced(1, replace(IDLE, queue=[Queued(0)] * 4), IDLE).part("own_weight") == [3.0, 3.0]
    assert priced(1, replace(IDLE, queue=[Queued(0)] * 500)).part("own_weight") == [17.0]


def test_host_tier_tokens_cost_their_copy() -> None:
    """Blocks in the host tier are cheaper than computing them and dearer than having them."""
    parameters = CostParameters(copy_tokens_per_s=10_000.0)
    on_device = replace(IDLE, cached_tokens=512)
    on_host = replace(on_device, host_tokens=512)
    costs = priced(1024, on_device, on_host, IDLE, parameters=parameters).part("cost_s")
    assert costs == sorted(costs)
    assert costs[1] - costs[0] == pytest.approx(512 / 10_000)


def test_a_nearly_full_kv_cache_costs_the_prefill_it_would_throw_away() -> None:
    """Tokens above nine tenths of the capacity are priced as prefill, below they cost nothing."""
    pod = replace(IDLE, load=load(kv_usage=0.8, kv_capacity_tokens=1000))
    assert priced(100, pod).part("kv_pressure_s") == [0.0]
    assert priced(300, pod).part("kv_pressure_s") == [pytest.approx(0.2)]


@pytest.mark.parametrize("host_tokens", [0, 100])
def test_cached_blocks_need_room_too(host_tokens: int) -> None:
    """Half of a prompt cached on a full pod is worth less than a little less of it where there is room.

    The blocks could be evicted, or lie in the host tier, as long as nobody ran; while it runs, none can.
    """
    full = Known(100, host_tokens, load=load(kv_usage=0.8, kv_capacity_tokens=1000))
    roomy = replace(full, cached_tokens=80, host_tokens=0, load=load(kv_capacity_tokens=1000))
    found = priced(200, full, roomy)
    assert found.part("kv_pressure_s") == [pytest.approx(0.1), 0.0]
    assert found.best == 1
    assert priced(100, full, roomy).best == 0


def test_an_old_account_of_an_engine_is_not_believed() -> None:
    """After five seconds neither a full cache nor a long queue of strangers counts; its age is told."""
    pod = replace(IDLE, load=load(waiting=9, kv_usage=1.0, kv_capacity_tokens=1000))
    fresh, old = priced(100, pod, now_s=5.0), priced(100, pod, now_s=5.1)
    assert fresh.part("kv_pressure_s")[0] > 0.0 < fresh.part("queued_prefill_s")[0]
    assert old.part("kv_pressure_s") == old.part("queued_prefill_s") == [0.0]
    assert old.part("load_age_s") == [5.1]
    assert priced(100, IDLE).part("load_age_s") == [float("inf")]


def test_strangers_in_an_engines_queue_cost_their_usual_prefill() -> None:
    """Of three in the queue two are others': each is taken for a usual request of 100 tokens."""
    pod = replace(IDLE, load=load(waiting=3))
    assert priced(100, pod).part("queued_prefill_s") == [pytest.approx(0.3)]
    told = priced(100, replace(IDLE, queue=[Queued(100)]))
    told.board.scraped("a:0", load(waiting=3))
    assert told.board.pods["foreign_waiting"].max() == 2.0


def test_decoding_requests_change_a_pick() -> None:
    """Of two pods, the one with less cache wins when 50 requests decode on the other: it is 40 % slower."""
    busy = Known(cached_tokens=100, decoding=50)
    assert priced(1000, busy, IDLE, parameters=CostParameters(decode_slowdown=0.0)).best == 0
    found = priced(1000, busy, IDLE)
    assert found.best == 1
    assert found.part("slowdown") == [pytest.approx(1.4), 1.0]


def test_others_decoding_requests_count_too() -> None:
    """What an engine runs beyond what this router sent slows it as much."""
    assert priced(1000, Known(load=load(running=50)), IDLE).part("slowdown") == [pytest.approx(1.4), 1.0]


def test_a_running_prefills_elapsed_time_changes_a_pick() -> None:
    """Of two equal queues, the one whose head began a second ago is shorter by half of that."""
    began, fresh = Known(queue=[Queued(2000, sent_s=0.0)]), Known(queue=[Queued(1800, sent_s=1.0)])
    assert priced(100, began, fresh, now_s=1.0, parameters=CostParameters(elapsed_share=0.0)).best == 1
    found = priced(100, began, fresh, now_s=1.0)
    assert found.best == 0
    assert found.part("queued_prefill_s") == [pytest.approx(1.5), pytest.approx(1.8)]


def test_a_prefill_that_takes_too_long_uses_up_nobody_elses_time() -> None:
    """When the head runs too long, the queue behind it stays as long as it is, and half of the head."""
    found = priced(100, Known(queue=[Queued(1000), Queued(700)]), now_s=1.7)
    assert found.part("queued_prefill_s") == [pytest.approx(0.5 + 0.7)]


def test_an_overdue_queue_changes_a_pick() -> None:
    """A pod that should be done for long is not the one for a request that another can begin soon.

    It lasts half as much longer as it is late, and at most a second.
    """
    late, busy = Known(queue=[Queued(20)]), Known(queue=[Queued(200, sent_s=0.5)])
    assert priced(100, late, replace(busy, queue=[Queued(200)])).best == 0
    found = priced(100, late, busy, now_s=0.52)
    assert found.best == 1
    assert found.part("queued_prefill_s")[0] == pytest.approx(0.01 + 0.25)
    for now_s, overdue_s in ((0.02, 0.0), (1.02, 0.5), (2.02, 1.0), (50.0, 1.0)):
        queued_s = priced(100, late, now_s=now_s).part("queued_prefill_s")
        assert queued_s == [pytest.approx(0.01 + overdue_s)]


def test_nobody_is_overdue_where_nobody_waits() -> None:
    """A pod at rest costs nothing, however long ago its last prefill ended."""
    assert priced(100, replace(IDLE, decoding=1), now_s=100.0).part("queued_prefill_s") == [0.0]


def test_seconds_that_others_ask_for_are_added() -> None:
    """Extra seconds move the price as they are, whatever their sign."""
    plain, moved = priced(100, IDLE, IDLE), priced(100, IDLE, IDLE, extra_s=[0.5, -0.25])
    assert moved.part("extra_s") == [0.5, -0.25]
    assert np.subtract(moved.part("cost_s"), plain.part("cost_s")).tolist() == [0.5, -0.25]


@given(st.lists(POD, min_size=1, max_size=6), st.integers(1000, 100_000), st.floats(0, 10))
def test_a_smaller_cache_or_a_longer_queue_never_makes_a_pod_cheaper(
    pods: list[Known], tokens: int, now_s: float
) -> None:
    """Less cache or more queued never lowers a price; every price is a number."""
    pods = [_untold(pod) for pod in pods]
    worse = [
        replace(pod, cached_tokens=pod.cached_tokens // 2, queue=[*pod.queue, Queued(1)]) for pod in pods
    ]
    before, after = priced(tokens, *pods, now_s=now_s), priced(tokens, *worse, now_s=now_s)
    for cheaper, dearer in zip(before.part("cost_s"), after.part("cost_s"), strict=True):
        assert 0.0 <= cheaper <= dearer * (1 + 1e-9) < float("inf")


@given(st.lists(POD, min_size=1, max_size=6), st.integers(1000, 100_000), st.floats(0, 10))
def test_more_decoding_requests_never_make_a_pod_cheaper(
    pods: list[Known], tokens: int, now_s: float
) -> None:
    """A slower pod costs more."""
    pods = [_untold(pod) for pod in pods]
    worse = [replace(pod, decoding=pod.decoding + 1) for pod in pods]
    costs = priced(tokens, *pods, now_s=now_s).part("cost_s")
    dearer_costs = priced(tokens, *worse, now_s=now_s).part("cost_s")
    for cheaper, dearer in zip(costs, dearer_costs, strict=True):
        assert 0.0 <= cheaper <= dearer * (1 + 1e-9) < float("inf")


def _untold(pod: Known) -> Known:
    """The pod with an account too old to count: it tells of strangers by what is known of ours."""
    return replace(pod, load=pod.load and replace(pod.load, scraped_s=-100.0))


@pytest.mark.parametrize(
    ("length", "blocks", "by_tier", "credit"),
    [
        (65, 4, {"gpu": 4}, (64, 0)),
        (64, 4, {"gpu": 4}, (48, 0)),
        (200, 4, {"gpu": 1, "speculative": 2, "cpu": 1}, (64, 16)),
        (64, 4, {"gpu": 3, "cpu": 1}, (48, 0)),
        (5, 0, {}, (0, 0)),
        (0, 0, {}, (0, 0)),
    ],
)
def test_credit_is_what_an_engine_can_serve(
    length: int, blocks: int, by_tier: dict[str, int], credit: tuple[int, int]
) -> None:
    """Whole blocks, never the last token; what is on the device or on its way there needs no copy."""
    tiers = Tiers()
    counts = np.zeros((1, len(tiers.names)), np.int32)
    for tier, count in by_tier.items():
        counts[0, tiers.number(tier)] = count
    credits = np.zeros(1, CREDIT)
    device = np.array([tiers.number("gpu"), tiers.number("speculative")])
    strides = np.zeros(0, np.int32)
    add_credit(
        np.array([blocks], np.int32), counts, strides, device, np.zeros(1, np.int64), length, 16, credits
    )
    assert tuple(credits[0].tolist()) == credit


def test_credit_is_whole_blocks_of_the_engine() -> None:
    """Where an engine's block is three of the index, what fills none of its blocks is not served."""
    credits = np.zeros(1, CREDIT)
    strides = np.full(1, 3, np.int32)
    blocks, counts = np.full(1, 5, np.int32), np.full((1, 1), 5, np.int32)
    row = np.zeros(1, np.int64)
    add_credit(blocks, counts, strides, np.zeros(1, np.int64), row, 1_000, 16, credits)
    assert tuple(credits[0].tolist()) == (48, 0)
