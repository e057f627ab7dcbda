"""Engines that cache nothing are named by what their metrics pages show."""

from __future__ import annotations

from dataclasses import replace

import pytest

from indexer.audit.cache_watch import CacheWatch, FaultKind
from indexer.audit.engine_counters import CachingFacts

START = CachingFacts(is_on=True, block_tokens=16, prompts=100.0, prompts_tokens=50_000.0)


def after(prompts: int, mean_tokens: int, reading: CachingFacts = START) -> CachingFacts:
    """Return a later reading, after so many prompts of this mean length."""
    tokens = reading.prompts_tokens + prompts * mean_tokens
    return replace(reading, prompts=reading.prompts + prompts, prompts_tokens=tokens)


def verdict(*readings: CachingFacts, stored: bool) -> FaultKind | None:
    """Return the fault after these readings."""
    watch = CacheWatch()
    for reading in readings:
        watch.observe(reading, stored=stored)
    return None if watch.fault is None else watch.fault.kind


def test_caching_that_is_off_is_told_by_the_first_page() -> None:
    """The engine's setting is enough, and the fault ends when another process has it on."""
    off = replace(START, is_on=False)
    assert verdict(off, stored=False) is FaultKind.CACHING_OFF
    assert verdict(off, START, stored=False) is None


@pytest.mark.parametrize(
    ("prompts", "mean_tokens", "stored", "fault"),
    [
        (32, 500, True, None),
        (32, 500, False, FaultKind.NOTHING_STORED),
        (31, 500, False, None),
        (100, 20, False, None),
        (32, 15, True, FaultKind.BLOCKS_TOO_LARGE),
        (32, 16, True, None),
    ],
)
def test_a_verdict_needs_enough_prompts(
    prompts: int, mean_tokens: int, stored: bool, fault: FaultKind | None
) -> None:
    """Prompts shorter than a block, and enough prompts without any stored block, are faults."""
    assert verdict(START, after(prompts, mean_tokens), stored=stored) is fault


def test_a_verdict_follows_the_latest_prompts() -> None:
    """A fault ends with the next window of prompts that contradicts it."""
    short = after(40, 10)
    assert verdict(START, short, after(40, 100, short), stored=True) is None


def test_a_fault_that_lasts_keeps_its_text() -> None:
    """The figures are those of the first verdict, so that a fault is reported once."""
    watch, reading = CacheWatch(), START
    texts = []
    for mean in (5, 6, 7):
        watch.observe(reading, stored=True)
        reading = after(40, mean, reading)
        watch.observe(reading, stored=True)
        texts.append(watch.fault and watch.fault.text)
    assert texts == [texts[0]] * 3
    assert "prompts of 5" in str(texts[0])


def test_another_process_starts_anew() -> None:
    """Counters that decreased or were missing begin another window."""
    restarted = replace(START, prompts=1.0, prompts_tokens=10.0)
    assert verdict(START, restarted, after(31, 1, restarted), stored=True) is None
    assert verdict(START, CachingFacts(), after(32, 5), stored=True) is None
