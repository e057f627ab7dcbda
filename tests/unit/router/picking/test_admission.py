"""Admission control by priority and saturation, and the delay of LoRA adapters."""

from __future__ import annotations

import pytest

from router.errors import SaturatedError
from router.picking.cost import adapter_delay_s
from router.picking.flow_queue import UtilizationDetector
from router.picking.route import Admission
from router.pods.engine_load import EngineLoad, LoraLoad
from router.pods.load_table import PodLoadTable
from tests.support.router.pricing import load

PRIORITIES = {"batch": -1, "chat": 5}
BATCH, CHAT = {"x-llm-d-inference-objective": "batch"}, {"x-llm-d-inference-objective": "chat"}
FULL, HALF = load(waiting=5), load(kv_usage=0.4)


def admitted(headers: dict[str, str], *loads: EngineLoad | None, now_s: float = 0.0) -> int:
    """Return the priority with which a request is admitted to pods with these loads."""
    load_table = PodLoadTable()
    names = [f"a:{index}" for index in range(len(loads))]
    for name, reported in zip(names, loads, strict=True):
        if reported is not None:
            load_table.scraped(name, reported)
    detector = UtilizationDetector(load_age_max_s=5.0)
    return Admission(PRIORITIES, detector, load_table).admit(headers, load_table.rows(names), now_s)


def test_a_negative_priority_is_rejected_while_all_pods_are_saturated() -> None:
    """With saturated pods, a request below priority 0 gets 429 with llm-d's reason; others are admitted."""
    with pytest.raises(SaturatedError) as caught:
        admitted(BATCH, FULL, FULL)
    assert (caught.value.status, caught.value.dropped_reason) == (429, "rejected-saturated")
    assert [admitted(headers, FULL, FULL) for headers in (CHAT, {})] == [5, 0]


def test_one_pod_with_capacity_admits_a_negative_priority() -> None:
    """Saturation is the mean over the pods, so one half-full pod admits the request."""
    assert admitted(BATCH, FULL, HALF) == -1


def test_kv_cache_and_queue_both_saturate_a_pod() -> None:
    """A pod is full at 80 % of its KV cache or 5 queued requests, and saturation is the mean over pods."""
    assert admitted(BATCH, load(kv_usage=0.79)) == -1
    with pytest.raises(SaturatedError):
        admitted(BATCH, load(kv_usage=0.8))
    with pytest.raises(SaturatedError):
        admitted(BATCH, load(waiting=10), load())


def test_a_pod_without_recent_metrics_counts_as_saturated() -> None:
    """A pod without metrics, or with stale ones, counts as full."""
    for pods, now_s in (([None], 0.0), ([HALF], 5.5)):
        with pytest.raises(SaturatedError):
            admitted(BATCH, *pods, now_s=now_s)


def test_the_old_objective_header_is_a_fallback() -> None:
    """The old header is read if the new one is missing; an unknown objective has priority 0."""
    old = {"x-gateway-inference-objective": "chat"}
    assert admitted(old, HALF) == 5
    assert admitted(old | BATCH, HALF) == -1
    assert admitted({"x-llm-d-inference-objective": "unknown"}, FULL) == 0


def lora(running: str = "", waiting: str = "", places: int = 2) -> LoraLoad:
    """Return an adapter load from space-separated names."""
    return LoraLoad(frozenset(running.split()), frozenset(waiting.split()), places)


def test_adapter_delays_are_ordered_as_llm_d_scores_adapters() -> None:
    """Delay grows from a running adapter over a free slot and a waiting adapter to no slot."""
    cases = [lora("sql other"), lora("other"), lora("a b", "sql"), lora("a b")]
    seconds = [adapter_delay_s(case, "sql") for case in cases]
    assert seconds == pytest.approx([0.0, 0.2, 1.2, 2.2])


def test_a_pod_without_adapter_metrics_has_no_adapter_delay() -> None:
    """An engine that does not report adapters has no delay."""
    assert adapter_delay_s(None, "sql") == 0.0


@pytest.mark.parametrize(
    ("sent", "seconds"),
    [
        (("sql",), 0.0),
        (("other",), 0.2),
        (("other", "third"), 2.2),
        (("other", "third", "sql"), 1.2),
        (("other", "sql", "third"), 0.0),
    ],
)
def test_adapters_sent_since_the_last_scrape_take_slots(sent: tuple[str, ...], seconds: float) -> None:
    """The adapters that were sent first take the free slots; later ones wait for a slot."""
    assert adapter_delay_s(lora(), "sql", sent) == pytest.approx(seconds)


def test_a_sent_adapter_that_the_engine_reports_counts_once() -> None:
    """A sent adapter that is reported as running or waiting takes no second slot."""
    assert adapter_delay_s(lora("a"), "sql", ("a",)) == pytest.approx(0.2)
    assert adapter_delay_s(lora("", "a"), "sql", ("a",)) == pytest.approx(0.2)
