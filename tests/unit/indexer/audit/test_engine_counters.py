"""Comparison of an engine's counters with its view: only sound signals are findings."""

from __future__ import annotations

from dataclasses import replace

import pytest

from indexer.audit.engine_counters import EngineReading, Finding, check_counters

BEFORE = EngineReading(
    started_s=1e9,
    capacity_blocks=100,
    prompt_tokens=5000,
    query_tokens=5000,
    hit_tokens=100,
    predicted_tokens=100,
    predicted_sent_tokens=100,
)


def test_a_healthy_engine_has_no_finding() -> None:
    """Growing counters, an unchanged process and a view within the capacity are no finding."""
    now = replace(BEFORE, prompt_tokens=9000, query_tokens=90_000, hit_tokens=200, predicted_tokens=80_000)
    assert check_counters(BEFORE, now, 100) is None
    assert check_counters(None, now, None) is None


@pytest.mark.parametrize(
    "change",
    [{"started_s": 1e9 + 1}, {"capacity_blocks": 101}, {"prompt_tokens": 1}, {"hit_tokens": 99}],
)
def test_another_process_is_known_by_what_cannot_change(change: dict[str, float]) -> None:
    """A changed start time or capacity, or a counter that decreased, means a new process."""
    assert check_counters(BEFORE, replace(BEFORE, **change), 0) is Finding.PROCESS_CHANGED


def test_missing_counters_are_no_finding() -> None:
    """A counter that is missing on the page counts as unchanged."""
    assert check_counters(BEFORE, EngineReading(), 1000) is None
    assert check_counters(EngineReading(), BEFORE, 10) is None


def test_a_sleeping_engine_has_no_cache() -> None:
    """Sleeping is the only finding that means an empty cache."""
    assert check_counters(BEFORE, replace(BEFORE, asleep=True), 10) is Finding.ASLEEP
    assert [finding for finding in Finding if finding.emptied] == [Finding.ASLEEP]


def test_a_view_larger_than_the_cache_is_wrong() -> None:
    """A view with more blocks than the engine's capacity is a finding."""
    assert check_counters(None, BEFORE, 101) is Finding.OVERFULL


@pytest.mark.parametrize(
    ("predicted", "hits", "found"), [(4096, 0, True), (4095, 0, False), (9000, 1, False)]
)
def test_predicted_hits_without_actual_hits_are_a_finding(predicted: int, hits: int, found: bool) -> None:
    """Many predicted hits that were looked up and not found are a finding."""
    now = replace(
        BEFORE,
        query_tokens=BEFORE.query_tokens + 10_000,
        hit_tokens=BEFORE.hit_tokens + hits,
        predicted_tokens=BEFORE.predicted_tokens + predicted,
    )
    assert check_counters(BEFORE, now, 10) is (Finding.PHANTOM_HITS if found else None)


def test_a_request_that_was_in_flight_is_no_phantom() -> None:
    """Hits of a request in flight may be counted on the earlier page already."""
    before = replace(BEFORE, predicted_sent_tokens=100 + 8000)
    now = replace(BEFORE, query_tokens=50_000, predicted_tokens=100 + 8000, predicted_sent_tokens=100 + 8000)
    assert check_counters(before, now, 10) is None
