"""What the parity watch finds is counted, warned of and told."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from indexer.audit.mismatch_watch import DispatchKey, MismatchWatch
from indexer.index.contract import IndexStats
from indexer.keys import BlockHasher
from indexer.metrics import IndexerMetrics
from indexer.views.view_parts import StoredRun

POD, MODEL = "10.0.0.1:8000", "m"
HASHER = BlockHasher(4, 1)
ROOT = HASHER.root(MODEL, None, None)
OURS, THEIRS = np.array([1, 2, 3, 4], np.uint32), np.array([1, 2, 9, 4], np.uint32)


class Bench:
    """A watch, and what it tells."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        metrics = IndexerMetrics(self.registry, stats=lambda: IndexStats(0, 0, 0, 0), speculative=lambda: 0)
        self.watch = MismatchWatch(metrics, never_hit_dispatches=2, warn_every_s=60.0)

    def disagree(self, request_id: str, now_s: float, root: int = ROOT) -> None:
        """A request whose tokens the engine sees differently, or under another root."""
        request = DispatchKey(request_id, now_s)
        self.watch.expect(request, POD, MODEL, ROOT, HASHER.chain(ROOT, OURS), OURS)
        keys = HASHER.chain(root, THEIRS)
        self.watch.stored(POD, [StoredRun(root, keys, THEIRS)], keys.tolist())
        self.watch.settle(request, now_s)

    def metric(self, name: str, **labels: str) -> float | None:
        """A metric's value."""
        return self.registry.get_sample_value(f"kvroute_indexer_{name}", labels)


def test_a_mismatch_is_counted_and_its_position_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Each is counted, a warning comes once a minute, and /ready has a line; no token id is in either."""
    bench = Bench()
    with caplog.at_level(logging.WARNING):
        bench.disagree("a", 0.0)
        bench.disagree("b", 59.0)
        assert len(caplog.records) == 1
        bench.disagree("c", 60.0)
    assert len(caplog.records) == 2
    assert bench.metric("parity_mismatches_total", pod=POD, model=MODEL) == 3
    assert "request=a " in caplog.records[0].getMessage()
    for told in (caplog.records[0].getMessage(), *bench.watch.details()):
        for part in (POD, MODEL, "first_differing_token=2 "):
            assert part in told
        for window in ("[3, 4]", "[9, 4]", "3, 4", "9, 4"):
            assert window not in told


def test_a_pod_that_never_hits_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    """Stores under another root show in the gauge, in one warning and in a line."""
    bench, other = Bench(), HASHER.root("other", None, None)
    for number in range(2):
        bench.disagree(str(number), 0.0, other)
    with caplog.at_level(logging.WARNING):
        bench.watch.check(0.0)
        bench.watch.check(1.0)
    assert bench.metric("parity_never_hit", pod=POD) == 1
    assert len(caplog.records) == len(bench.watch.details()) == 1
    assert "requests=2;" in caplog.records[0].getMessage()


def test_a_pod_that_is_gone_leaves_no_series() -> None:
    """Nor lines."""
    bench = Bench()
    bench.disagree("a", 0.0)
    bench.watch.check(0.0)
    bench.watch.forget_pod(POD)
    assert bench.metric("parity_mismatches_total", pod=POD, model=MODEL) is None
    assert bench.metric("parity_never_hit", pod=POD) is None
    assert bench.watch.details() == []
