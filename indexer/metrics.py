"""Prometheus metrics of the indexer, on a registry that is passed in.

Metrics named `llm_d_epp_*` are those of llm-d's router, so that its dashboards work; metrics named
`kvroute_indexer_*` are our own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common.counters import BatchedMetrics
from common.repeated_log import REPEATED_EVENTS
from indexer.index.contract import IndexStats

_INDEX = "llm_d_epp_kv_cache_index_"
_EVENTS = "llm_d_epp_kv_cache_events_"
_OURS = "kvroute_indexer_"

_LAG_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
_SNAPSHOT_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_LOOKUP_BUCKETS_S = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3)


class IndexerMetrics:
    """All metrics of one indexer; `stats` and `speculative` are called at every scrape."""

    def __init__(
        self, registry: CollectorRegistry, *, stats: Callable[[], IndexStats], speculative: Callable[[], int]
    ) -> None:
        self._registry = registry
        self._applied = BatchedMetrics(registry)
        # Callers hold it when they change `messages`, `events`, `lag_s`, admissions and removals.
        self.lock = self._applied.lock
        self._add_event_metrics()
        self._add_stream_metrics()
        registry.register(_Sizes(stats, speculative))
        registry.register(REPEATED_EVENTS)

    def looked_up(self, longest_blocks: int, took_s: float) -> None:
        with self._lookups_lock:
            self._lookup_s.observe(took_s)
            self._prompts.add()
            self._hits.add(number=longest_blocks)
            self._best_hits.add(number=longest_blocks)

    def forget(self, pod: str) -> None:
        for metric, label in (
            (self.stream_state, "pod"),
            (self.gaps, "pod"),
            (self.orphans, "pod"),
            (self.reconnections, "pod_identifier"),
            (self.zmq_errors, "pod_identifier"),
        ):
            metric.remove_by_labels({label: pod})
        with self.lock:
            self.messages.drop([(pod,)])

    def _add_event_metrics(self) -> None:
        counter, tally, by_pod = partial(self._counter, _EVENTS), self._applied.counter, "pod_identifier"
        lookups = BatchedMetrics(self._registry)
        self._lookups_lock = lookups.lock
        self.admissions = tally(_INDEX + "admissions", "Blocks announced and added to the index.")
        self.evictions = tally(_INDEX + "evictions", "Engine blocks removed by events.")
        self._prompts = lookups.counter(_INDEX + "lookup_requests", "Prompts looked up.")
        self._hits = lookups.counter(_INDEX + "lookup_hits", "Blocks of the prompts' longest matches.")
        self._best_hits = lookups.counter(_INDEX + "max_pod_hit_count", "Blocks matched at the best pod.")
        self._lookup_s = lookups.histogram(
            _INDEX + "lookup_latency_seconds", "Time of one lookup.", _LOOKUP_BUCKETS_S
        )
        self.subscribers = self._gauge(_EVENTS + "active_subscribers", "Pods whose publisher is connected.")
        self.reconnections = counter("subscriber_reconnections", "Connections to a publisher lost.", by_pod)
        self.zmq_errors = counter("zmq_errors", "Socket operations that failed.", by_pod, "operation")
        self.stores_skipped = counter("stores_skipped", "Stores that cannot be used.", "reason")
        self.removals_skipped = counter("removals_skipped", "Removals that cannot be used.", "reason")
        self.messages = tally(_EVENTS + "messages_received", "Live batches received.", [by_pod])
        self.removals_last = tally(
            _EVENTS + "dedup_removed_hashes_forwarded", "Removed hashes without a further copy in the tier."
        )
        self.removals_copy = tally(
            _EVENTS + "dedup_removed_hashes_suppressed", "Removed hashes with a further copy in the tier."
        )

    def _add_stream_metrics(self) -> None:
        counter, gauge = partial(self._counter, _OURS), self._gauge
        self.stream_state = gauge(_OURS + "stream_state", "1 for a stream's present state.", "pod", "state")
        self.gaps = counter("gaps", "Gaps in the sequence numbers of a stream.", "pod")
        self.replays = counter("replays", "Replays, by outcome.", "outcome")
        self.snapshots = counter("snapshots", "Snapshots requested from engines, by outcome.", "outcome")
        self.parity_mismatches = counter(
            "parity_mismatches", "Requests whose tokens differ from the engine's.", "pod", "model"
        )
        self.parity_never_hit = gauge(
            _OURS + "parity_never_hit", "1 for a pod whose blocks never match ours.", "pod"
        )
        self.findings = counter("findings", "Views found wrong by the engine's metrics.", "finding")
        self.clears = counter("pod_clears", "Views cleared, by reason.", "reason")
        self.rejected = counter("rejected", "Malformed frames, batches and events.", "reason")
        self.orphans = gauge(_OURS + "orphans", "Stores that wait for their parent block.", "pod")
        self.events = self._applied.counter(
            _OURS + "events", "Decoded events, by type, applied or not.", ["type"]
        )
        self.lag_s = self._applied.histogram(
            _OURS + "event_lag_seconds",
            "Time from an engine's time stamp to the batch being applied.",
            _LAG_BUCKETS_S,
        )
        histogram = partial(Histogram, registry=self._registry, buckets=_SNAPSHOT_BUCKETS_S)
        self.bootstraps = counter("bootstraps", "Views built, by source.", "source")
        self.snapshot_bytes = counter("snapshot_bytes", "Bytes of snapshots applied.", "source")
        self.snapshot_s = histogram(_OURS + "snapshot_seconds", "Time from request to applied.", ["source"])
        self.peers_asked = counter("peer_snapshots", "Snapshots requested from peers, by outcome.", "outcome")
        self.exports = counter("told_snapshots", "Snapshots requested by peers, by outcome.", "outcome")
        self.export_bytes = counter("told_snapshot_bytes", "Bytes of snapshots sent to peers.")
        self.export_s = histogram(_OURS + "told_snapshot_seconds", "Time from request to last message.")

    def _counter(self, prefix: str, name: str, text: str, *labels: str) -> Counter:
        return Counter(prefix + name, text, labels, registry=self._registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self._registry)


class _Sizes(Collector):
    def __init__(self, stats: Callable[[], IndexStats], speculative: Callable[[], int]) -> None:
        self._stats = stats
        self._speculative = speculative

    def describe(self) -> Iterator[Metric]:
        yield from self._metrics(IndexStats(0, 0, 0, 0), 0)

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics(self._stats(), self._speculative())

    def _metrics(self, stats: IndexStats, speculative: int) -> Iterator[Metric]:
        yield GaugeMetricFamily(_OURS + "blocks", "Unique blocks in the index.", stats.blocks)
        yield GaugeMetricFamily(_OURS + "capacity_blocks", "Most unique blocks.", stats.capacity_blocks)
        yield GaugeMetricFamily(_OURS + "holdings", "Pairs of (block, pod) in the index.", stats.holdings)
        yield CounterMetricFamily(
            _OURS + "evicted_blocks", "Blocks evicted because of the capacity.", stats.evicted_blocks
        )
        yield GaugeMetricFamily(_OURS + "speculative_entries", "Triples (request, pod, block).", speculative)
