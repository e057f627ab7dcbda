"""Discovery of pods, objectives and rewrites by four watches of the Kubernetes API.

Each watch runs on its own thread and publishes immutable mirrors, which callers combine on their own threads.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, replace
from itertools import chain
from typing import Any

from prometheus_client import CollectorRegistry

from indexer import EngineState
from indexer.config import PODS_MAX
from indexer.pod_entry import PodEntry
from router.config.kube import LLMD_GROUP, OLD_GROUP, POOL_GROUP, POOL_VERSIONS, KubeConfig
from router.config.picker_file import Resources
from router.pods.kube.client import Kind, KubeClient
from router.pods.kube.objects import (
    BadObjectError,
    ObjectiveObject,
    OldPoolObject,
    PodObject,
    PoolObject,
    RewriteObject,
)
from router.pods.kube.pods import (
    PodEndpoints,
    Pool,
    Rewrites,
    declared,
    endpoints_of,
    is_ready,
    pool_of,
    priorities_of,
    rewrites_of,
)
from router.pods.kube.problems import (
    DiscoveryState,
    EventPoster,
    Problems,
    Reason,
    cluster_symptoms,
    pod_symptoms,
)
from router.pods.kube.reflector import Mirror, Reflector, WatchCollector
from router.pods.pod_set import Pod, PodsSource

_log = logging.getLogger(__name__)

_PODS_MAX = 2 * PODS_MAX
_OBJECTS_MAX = 10_000
_OBJECTIVE_VERSION = "v1alpha2"
_NO_REWRITES = "rewrites have no effect with --compat off; start the router with --compat answers"


@dataclass(eq=False)
class KubeSource(PodsSource):
    """Source of the pods of one InferencePool or label selector.

    Raises:
        ConfigError: There are no credentials for a cluster.
    """

    config: KubeConfig
    registry: InitVar[CollectorRegistry]
    # Called with priorities and rewrite rules whenever they may have changed, on any thread.
    on_resources: Callable[[Resources], None]
    rewrites: bool = True  # whether the router rewrites models

    def __post_init__(self, registry: CollectorRegistry) -> None:
        config = self.config
        self._client = KubeClient(config.kubeconfig)
        self._namespace = config.namespace or self._client.namespace
        self._notify: Callable[[], None] = lambda: None
        self._pool: Pool | None = None
        self._pool_problem = ""
        self._entries: tuple[PodEntry, ...] | None = None
        self._known: dict[str, tuple[PodObject, KubeConfig, PodEndpoints]] = {}
        self._left_out = 0
        self._annotation_problems: Mapping[str, str] = {}
        self._rewrites = Rewrites()
        self._own_uid = ""
        pool_kind: Any = PoolObject if config.pool_group == POOL_GROUP else OldPoolObject
        self._pods: Reflector[PodObject] = self._watch("pods", PodObject, _PODS_MAX, lambda: self._notify())
        self._pools: Reflector[PoolObject | OldPoolObject] = self._watch("pool", pool_kind, 1, self._on_pool)
        self._objectives: Reflector[ObjectiveObject] = self._watch(
            "objectives", ObjectiveObject, _OBJECTS_MAX, self._on_resources, optional=True
        )
        self._rewriting: Reflector[RewriteObject] = self._watch(
            "rewrites", RewriteObject, _OBJECTS_MAX, self._on_resources, optional=True
        )
        followed: list[Reflector[Any]] = [self._pods]
        if config.pool:
            followed += [self._pools, self._objectives, self._rewriting]
        self._watches = {watch.name: watch for watch in followed}
        self._poster = EventPoster(self._client, self._subject)
        self._problems = Problems(registry, self._poster.post)
        registry.register(WatchCollector(self._watches))

    def start(self, notify: Callable[[], None]) -> None:
        self._notify = notify
        config, namespace = self.config, self._namespace
        if config.pool:
            version = POOL_VERSIONS[config.pool_group]
            self._pools.follow(
                Kind(config.pool_group, version, "inferencepools", namespace, name=config.pool)
            )
            for watch, plural in (
                (self._objectives, "inferenceobjectives"),
                (self._rewriting, "inferencemodelrewrites"),
            ):
                watch.follow(
                    *(Kind(group, _OBJECTIVE_VERSION, plural, namespace) for group in (LLMD_GROUP, OLD_GROUP))
                )
            text = "watching InferencePool: namespace=%s name=%s group=%s"
            _log.info(text, namespace, config.pool, config.pool_group)
        else:
            self._pods.follow(self._pod_kind(config.selector))
            _log.info("watching pods: namespace=%s selector=%s", namespace, config.selector)
        for watch in self._watches.values():
            watch.start()
        self._poster.start()

    def close(self) -> None:
        for watch in self._watches.values():
            watch.close()
        self._poster.close()

    def changed(self) -> tuple[PodEntry, ...] | None:
        rules = self._rules()
        if rules is None:
            entries: tuple[PodEntry, ...] = ()
            # Report no pods only for a deleted pool, not before the first list.
            if self._entries is None or not self._pools.listed or self._pool is not None:
                return None
        elif not self._pods.listed:
            return None
        else:
            entries = self._declared(rules)
        if entries == self._entries:
            return None
        self._entries = entries
        return entries

    @property
    def listed(self) -> bool:
        """Whether the pods were listed, or the pool was looked up and is missing or invalid."""
        pool, pools = self.config.pool, self._pools
        is_missing = pools.listed and (pool not in pools.mirror.objects or bool(self._pool_problem))
        return self._pods.listed or (bool(pool) and is_missing)

    def waits_for(self) -> Sequence[str]:
        missing = []
        if self.config.pool and self._pool is None:
            missing.append(f"InferencePool {self._namespace}/{self.config.pool}")
        if not self._pods.listed:
            missing.append(f"pods of namespace {self._namespace}")
        return missing

    def check(self, pods: Iterable[Pod], engines: Collection[EngineState], now_s: float) -> None:
        mirror = self._pods.mirror
        bad_pods = mirror.problems
        if left_out := self._left_out + mirror.left_out:
            bad_pods[""] = f"{left_out} pods or endpoints above the limit are left out"
        probed = {address for _, _, known in self._known.values() for address in known.probed}
        state = DiscoveryState(
            errors={name: watch.error for name, watch in self._watches.items()},
            pool_listed=self._pools.listed,
            # A pool that was just listed is in the mirror first.
            pool=self._pool is not None or self.config.pool in self._pools.mirror.objects,
            pool_problem=self._pool_problem,
            selector=self.config.selector if self._pool is None else self._pool.selector,
            pods_listed=self._pods.listed,
            pods=len(mirror.objects),
            ready=sum(map(is_ready, mirror.objects.values())),
            bad={
                Reason.BAD_POD: bad_pods,
                Reason.BAD_ANNOTATION: self._annotation_problems,
                Reason.BAD_OBJECTIVE: self._objectives.mirror.problems,
                Reason.BAD_REWRITE: self._bad_rewrites(),
            },
        )
        symptoms = chain(
            cluster_symptoms(state, self.config, self._namespace), pod_symptoms(pods, engines, probed)
        )
        self._problems.update(symptoms, now_s)

    def status(self, now_s: float) -> Any:
        pool, rules = self._pool, self._rules()
        return {
            "source": "kubernetes",
            "namespace": self._namespace,
            "pool": {"group": self.config.pool_group, "name": self.config.pool, "found": pool is not None}
            if self.config.pool
            else None,
            "selector": self.config.selector or (pool.selector if pool is not None else None),
            "target_ports": list(rules.target_ports) if rules is not None else [],
            "waits_for": list(self.waits_for()),
            "endpoints": len(self._entries or ()),
            "watches": {name: watch.status() for name, watch in self._watches.items()},
            "problems": [
                {"reason": reason, "detail": one.detail, "for_s": round(now_s - one.since_s, 1)}
                for reason, one in self._problems.current.items()
            ],
        }

    def _watch(
        self, name: str, kind: Any, capacity: int, changed: Callable[[], None], *, optional: bool = False
    ) -> Reflector[Any]:
        mirror: Mirror[Any] = Mirror(kind, capacity)
        deadline_s = self.config.deadline_s
        return Reflector(name, self._client, mirror, changed, deadline_s=deadline_s, optional=optional)

    def _pod_kind(self, selector: str) -> Kind:
        return Kind("", "v1", "pods", self._namespace, selector=selector)

    def _rules(self) -> KubeConfig | None:
        """Return the settings of endpoints with the target ports; None while the pool is unknown."""
        if not self.config.pool:
            return self.config
        return replace(self.config, target_ports=self._pool.ports) if self._pool is not None else None

    def _declared(self, rules: KubeConfig) -> tuple[PodEntry, ...]:
        """Return all endpoints; those of unchanged pods are cached."""
        known, pods = {}, self._pods.mirror.objects
        for name, pod in pods.items():
            before = self._known.get(name)
            if before is not None and before[0] is pod and before[1] == rules:
                known[name] = before
            else:
                known[name] = (pod, rules, endpoints_of(pod, rules))
        self._known = known
        self._annotation_problems = {name: one.problem for name, (_, _, one) in known.items() if one.problem}
        entries, self._left_out = declared((pod, endpoints) for pod, _, endpoints in known.values())
        return entries

    def _on_pool(self) -> None:
        if not self._pools.listed:
            return
        mirror, name = self._pools.mirror, self.config.pool
        self._pool_problem = mirror.problems.get(name) or mirror.problems.get("", "")
        pool = self._pool
        if not self._pool_problem:
            try:
                pool = pool_of(mirror.objects[name]) if name in mirror.objects else None
            except BadObjectError as error:
                # Keep the last valid pool.
                self._pool_problem = str(error)
        if pool != self._pool:
            _log.info("InferencePool changed: namespace=%s name=%s pool=%s", self._namespace, name, pool)
        self._pool = pool
        self._pods.follow(*([self._pod_kind(pool.selector)] if pool is not None else []))
        self._notify()

    def _on_resources(self) -> None:
        if not (self._objectives.listed and self._rewriting.listed):
            return
        self._rewrites = rewrites_of(self._rewriting.mirror.objects.values(), self.config)
        priorities = priorities_of(self._objectives.mirror.objects.values(), self.config)
        self.on_resources(Resources(priorities, self._rewrites.rules))

    def _bad_rewrites(self) -> Mapping[str, str]:
        bad = {**self._rewrites.problems, **self._rewriting.mirror.problems}
        if self._rewrites.rules and not self.rewrites:
            bad[""] = _NO_REWRITES
        return bad

    def _subject(self) -> Mapping[str, str] | None:
        """Return the involvedObject of Events: the pool, or without a pool the router's own pod if known."""
        config, pool = self.config, self._pool
        name, namespace = os.environ.get("POD_NAME"), os.environ.get("POD_NAMESPACE")
        if pool is None and name and namespace:
            uid = self._own_uid = self._own_uid or self._client.uid(namespace, name)
            version, kind = "v1", "Pod"
        elif config.pool:
            version, kind = f"{config.pool_group}/{POOL_VERSIONS[config.pool_group]}", "InferencePool"
            name, namespace, uid = config.pool, self._namespace, pool.uid if pool is not None else ""
        else:
            return None
        return {"apiVersion": version, "kind": kind, "namespace": namespace, "name": name, "uid": uid}
