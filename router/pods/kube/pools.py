"""Discovery of the pods of several InferencePools, each with watches of its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, replace
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from indexer import EngineState
from indexer.pod_entry import PodEntry
from router.config.kube import KubeConfig
from router.config.picker_file import Resources
from router.pods.kube.source import KubeSource
from router.pods.pod_set import POOL_LABEL, Pod, PodsSource


@dataclass(eq=False)
class PoolSources(PodsSource, Collector):
    """Source of the pods of several pools, which are named in the pods' label `POOL_LABEL`.

    Its metrics are those of each pool's source, with a label for the pool. Several pools may select a pod.

    Raises:
        ConfigError: There are no credentials for a cluster.
    """

    config: KubeConfig
    registry: InitVar[CollectorRegistry]
    # Called with a pool and its priorities and rewrite rules whenever they may have changed, on any thread.
    on_resources: Callable[[str, Resources], None]
    rewrites: bool = True  # whether the router rewrites models

    def __post_init__(self, registry: CollectorRegistry) -> None:
        self._registries = {pool: CollectorRegistry() for pool in self.config.pools}
        self._sources: dict[str, KubeSource] = {
            pool: KubeSource(
                replace(self.config, pool=pool, more_pools=()),
                own,
                partial(self.on_resources, pool),
                self.rewrites,
            )
            for pool, own in self._registries.items()
        }
        self._entries: dict[str, tuple[PodEntry, ...]] = {}
        registry.register(self)

    def changed(self) -> tuple[PodEntry, ...] | None:
        # The router is ready with the first pods, and must then know those of every pool that exists.
        if not self._entries and not all(source.listed for source in self._sources.values()):
            return None
        changes = {pool: source.changed() for pool, source in self._sources.items()}
        if all(entries is None for entries in changes.values()):
            return None
        found: dict[str, tuple[PodEntry, list[str]]] = {}
        for pool, entries in changes.items():
            if entries is not None:
                self._entries[pool] = entries
            for entry in self._entries.get(pool, ()):
                found.setdefault(entry.pod, (entry, []))[1].append(pool)
        return tuple(
            replace(entry, labels={**entry.labels, POOL_LABEL: ",".join(pools)})
            for entry, pools in found.values()
        )

    def status(self, now_s: float) -> Any:
        pools = {pool: source.status(now_s) for pool, source in self._sources.items()}
        problems = [one for pool in pools.values() for one in pool["problems"]]
        return {"source": "kubernetes", "pools": pools, "problems": problems}

    def start(self, notify: Callable[[], None]) -> None:
        for source in self._sources.values():
            source.start(notify)

    def close(self) -> None:
        for source in self._sources.values():
            source.close()

    def waits_for(self) -> Sequence[str]:
        waits = (missing for source in self._sources.values() for missing in source.waits_for())
        return list(dict.fromkeys(waits))

    def check(self, pods: Iterable[Pod], engines: Collection[EngineState], now_s: float) -> None:
        by_pool: Mapping[str, list[Pod]] = {pool: [] for pool in self._sources}
        for pod in pods:
            for pool in pod.entry.labels[POOL_LABEL].split(","):
                by_pool[pool].append(pod)
        for pool, source in self._sources.items():
            own = {pod.address for pod in by_pool[pool]}
            source.check(by_pool[pool], [one for one in engines if one.stream.pod in own], now_s)

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for pool, registry in self._registries.items():
            for metric in registry.collect():
                family = families.setdefault(
                    metric.name, Metric(metric.name, metric.documentation, metric.type)
                )
                for sample in metric.samples:
                    family.add_sample(sample.name, {**sample.labels, "pool": pool}, sample.value)
        return families.values()
