"""Records of streams: metrics and warnings of mismatches."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from indexer.audit.mismatch_watch import EVENTS_LATE_MAX_S, DispatchKey, MismatchWatch
from indexer.index.contract import IndexStats
from indexer.keys import BlockHasher
from indexer.metrics import IndexerMetrics
from indexer.streams.records import StreamRecords
from indexer.views.view_parts import StoredRun

POD, MODEL = "10.0.0.1:8000", "m"
HASHER = BlockHasher(4, 1)
ROOT = HASHER.root(MODEL, None, None)
OURS, THEIRS = np.array([1, 2, 3, 4], np.uint32), np.array([1, 2, 9, 4], np.uint32)


class Bench:
    """Mismatch watch and its records."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        metrics = IndexerMetrics(self.registry, stats=lambda: IndexStats(0, 0, 0, 0), speculative=lambda: 0)
        self.records, self.watch = StreamRecords(metrics), MismatchWatch(never_hit_dispatches=2)

    def disagree(self, request_id: str, now_s: float, root: int = ROOT) -> None:
        """Run a request for which the engine stores other tokens, or tokens under another root."""
        request = DispatchKey(request_id, now_s)
        self.watch.expect(request, POD, MODEL, ROOT, HASHER.chain(ROOT, OURS), OURS)
        keys = HASHER.chain(root, THEIRS)
        self.watch.stored(POD, [StoredRun(root, keys, THEIRS)], keys.tolist())
        self.watch.settle(request, now_s)
        self.records.mismatches(self.watch.judge(now_s + EVENTS_LATE_MAX_S), (), now_s)

    def check(self, now_s: float) -> None:
        """Record the pods that never hit."""
        self.records.mismatches((), self.watch.report(), now_s)

    def metric(self, name: str, **labels: str) -> float | None:
        """Return the value of a metric."""
        return self.registry.get_sample_value(f"kvroute_indexer_{name}", labels)


def test_a_mismatch_is_counted_and_its_position_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Each mismatch is counted and on /ready; a warning is logged once a minute, without token ids."""
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
    """Stores under another root set the gauge and cause one warning and one line."""
    bench, other = Bench(), HASHER.root("other", None, None)
    for number in range(2):
        bench.disagree(str(number), 0.0, other)
    with caplog.at_level(logging.WARNING):
        bench.check(0.0)
        bench.check(1.0)
    assert bench.metric("parity_never_hit", pod=POD) == 1
    assert len(caplog.records) == len(bench.watch.details()) == 1
    assert "requests=2;" in caplog.records[0].getMessage()


def test_a_pod_that_is_gone_leaves_no_series() -> None:
    """A removed pod has neither metric series nor lines."""
    bench = Bench()
    bench.disagree("a", 0.0)
    bench.check(0.0)
    bench.watch.forget_pod(POD)
    bench.records.closed(POD, POD, 0)
    assert bench.metric("parity_mismatches_total", pod=POD, model=MODEL) is None
    assert bench.metric("parity_never_hit", pod=POD) is None
    assert bench.watch.details() == []
