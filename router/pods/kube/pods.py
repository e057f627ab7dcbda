"""From objects to what they say: a pod's endpoints, a pool, its objectives and model rewrites. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from indexer.config import PODS_MAX, RANKS_MAX
from indexer.pod_entry import (
    EVENT_LABELS,
    EVENTS_LABEL,
    METRICS_PATH_LABEL,
    MODEL_LABEL,
    PORT_LABELS,
    RANKS_LABEL,
    SNAPSHOT_LABEL,
    EventDefaults,
    PodEntry,
    label_problem,
)
from router.config.kube import POOL_GROUP, KubeConfig
from router.config.resources import RewriteRule
from router.pods.kube.objects import (
    BadObjectError,
    ObjectiveObject,
    OldPoolObject,
    PodObject,
    PoolObject,
    PoolReference,
    RewriteObject,
)

ANNOTATION_PREFIX = "kvroute.dev/"
ACTIVE_PORTS = ("llm-d.ai/active-ports", "inference.networking.k8s.io/active-ports")
"""Annotations that name the target ports in use; the first that is there counts."""

_LABEL_PREFIX = "kvroute.io/"
_OURS = frozenset({*EVENT_LABELS, *PORT_LABELS, METRICS_PATH_LABEL, MODEL_LABEL})
_PORT_MAX = 65_535
_OVER = ("Succeeded", "Failed")
_EXACT = "Exact"


@dataclass(frozen=True, slots=True)
class PodEndpoints:
    """The role of a pod for us."""

    entries: tuple[PodEntry, ...] = ()  # its endpoints, also while it is not Ready: its cache outlives that
    complaint: str = ""  # an annotation that is not understood, and so is passed over
    probed: tuple[str, ...] = ()  # addresses of those whose port a readiness probe of the pod asks


def endpoints_of(pod: PodObject, rules: KubeConfig) -> PodEndpoints:
    """A pod's endpoints; none while it has no address, is ending or is over.

    Args:
        rules: What all pods have in common; an endpoint's rank is its port's place among the target ports.
    """
    status, metadata = pod.status, pod.metadata
    if status is None or metadata.deletion_timestamp is not None or status.phase in _OVER:
        return PodEndpoints()
    if (address := _address(status.pod_ip)) is None:
        return PodEndpoints()
    annotations = metadata.annotations or {}
    ports, complaint_of_ports = _active_ports(annotations, rules.target_ports)
    given, complaint = _own_labels(annotations, rules)
    labels = {name: value for name, value in (metadata.labels or {}).items() if name not in _OURS}
    entries = []
    for rank, port in enumerate(rules.target_ports):
        if port not in ports:
            continue
        entries.append(
            PodEntry(
                name=f"{metadata.name}-rank-{rank}" if len(rules.target_ports) > 1 else metadata.name,
                namespace=metadata.namespace or "default",
                address=address,
                port=port,
                labels={**labels, **_of_rank(given, rank)},
                epoch=_life(pod),
                ready=is_ready(pod),
                events=EventDefaults(
                    port=rules.events_port + rank,
                    replay_port=rules.replay_port + rank if rules.replay_port else None,
                    snapshots=True,
                    asks_engine=True,
                    rank=rank if len(rules.target_ports) > 1 else None,
                ),
            )
        )
    probed_ports = _probed_ports(pod)
    probed = tuple(entry.pod for entry in entries if entry.port in probed_ports)
    return PodEndpoints(tuple(entries), complaint_of_ports or complaint, probed)


def is_ready(pod: PodObject) -> bool:
    """Whether its condition Ready is true."""
    conditions = pod.status.conditions if pod.status is not None else None
    return any(condition.type == "Ready" and condition.status == "True" for condition in conditions or ())


def declared(pods: Iterable[tuple[PodObject, PodEndpoints]]) -> tuple[tuple[PodEntry, ...], int]:
    """All endpoints by name, each address once, and how many there was no room for.

    Of two pods with one address the Ready one counts, then the younger: the other's end was not told yet.
    """
    by_address: dict[str, tuple[tuple[bool, str, str], PodEntry]] = {}
    for pod, endpoints in pods:
        rank = (is_ready(pod), pod.metadata.creation_timestamp or "", pod.metadata.name)
        for entry in endpoints.entries:
            known = by_address.get(entry.pod)
            if known is None or known[0] < rank:
                by_address[entry.pod] = (rank, entry)
    entries = sorted((entry for _, entry in by_address.values()), key=lambda entry: (entry.name, entry.port))
    return tuple(entries[:PODS_MAX]), max(0, len(entries) - PODS_MAX)


def _probed_ports(pod: PodObject) -> set[int]:
    """Return the ports that the readiness probes of the pod's containers ask."""
    ports: set[int] = set()
    for container in (pod.spec.containers if pod.spec is not None else None) or ():
        if (probe := container.readiness_probe) is None:
            continue
        by_name = {port.name: port.container_port for port in container.ports or ()}
        for asked in (probe.http_get, probe.tcp_socket, probe.grpc):
            if asked is not None:
                # A name that no port has is no port.
                ports.add(asked.port if isinstance(asked.port, int) else by_name.get(asked.port, 0))
    return ports


def _address(text: str | None) -> str | None:
    try:
        return str(ipaddress.ip_address(text or ""))
    except ValueError:
        return None


def _life(pod: PodObject) -> str:
    """The pod's uid with the lives of its containers: a container that came anew has an empty cache."""
    containers = (pod.status.container_statuses if pod.status is not None else None) or ()
    lives = sorted(f"{one.name}:{one.restart_count}:{one.container_id or ''}" for one in containers)
    return " ".join([pod.metadata.uid, *lives])


def _active_ports(annotations: Mapping[str, str], ports: Sequence[int]) -> tuple[Collection[int], str]:
    name = next((name for name in ACTIVE_PORTS if name in annotations), None)
    if name is None:
        return ports, ""
    items = [item for item in map(str.strip, annotations[name].split(",")) if item]
    used = [port for port in ports if str(port) in items]
    stranger = next((item for item in items if item not in map(str, ports)), None)
    return used, f"{name}: {stranger[:20]!r} is no target port of the pool" if stranger else ""


def _own_labels(annotations: Mapping[str, str], rules: KubeConfig) -> tuple[dict[str, str], str]:
    """The annotations as labels of a pods file, and what is wrong with the first that is not understood."""
    given: dict[str, str] = {}
    complaint = ""
    for label in sorted(_OURS):
        name = ANNOTATION_PREFIX + label.removeprefix(_LABEL_PREFIX)
        value = annotations.get(name)
        if value is None:
            continue
        problem = label_problem(label, value) or _unfit(label, value, rules)
        if problem is None:
            given[label] = value
        else:
            complaint = complaint or f"{name}: {problem[:200]}"
    if given.get(RANKS_LABEL, "1") != "1" and given.get(SNAPSHOT_LABEL) == "true":
        del given[SNAPSHOT_LABEL]
        snapshot = f"{ANNOTATION_PREFIX}kv-snapshot: a snapshot of one engine is none of all ranks"
        complaint = complaint or snapshot
    return given, complaint


def _unfit(label: str, value: str, rules: KubeConfig) -> str | None:
    """What keeps a well-formed value from being used here."""
    if label == EVENTS_LABEL and value == "connects" and not rules.events_bind:
        return "the router has no --events-bind to connect to"
    if label == RANKS_LABEL and int(value) > 1 and len(rules.target_ports) > 1:
        return "ranks with target ports of their own have none behind them"
    if label in PORT_LABELS and int(value) + RANKS_MAX > _PORT_MAX:
        return f"must be at most {_PORT_MAX - RANKS_MAX}, so that there is room for ranks"
    return None


def _of_rank(labels: Mapping[str, str], rank: int) -> dict[str, str]:
    """Labels of one of the pod's endpoints: each rank has ports of its own."""
    return {name: str(int(value) + rank) if name in PORT_LABELS else value for name, value in labels.items()}


@dataclass(frozen=True, slots=True)
class Pool:
    """An InferencePool: its label selector and target ports; Events are tied to it by `uid`."""

    name: str
    uid: str
    selector: str
    ports: tuple[int, ...]


def pool_of(pool: PoolObject | OldPoolObject) -> Pool | None:
    """What the pool says; None while it is being deleted.

    Raises:
        BadObjectError: It cannot be used.
    """
    metadata = pool.metadata
    if metadata.deletion_timestamp is not None:
        return None
    if isinstance(pool, OldPoolObject):
        labels = pool.spec.selector
        ports: tuple[int, ...] = (pool.spec.target_port_number,)
    else:
        labels = pool.spec.selector.match_labels
        ports = tuple(dict.fromkeys(port.number for port in pool.spec.target_ports))
    if not labels:
        raise BadObjectError("spec.selector: is empty, which would select every pod of the namespace")
    selector = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
    return Pool(metadata.name, metadata.uid, selector, ports)


@dataclass(frozen=True, slots=True)
class Rewrites:
    """The rules of all rewrites, the oldest object's first; by object, what cannot mean what it says."""

    rules: Sequence[RewriteRule] = ()
    complaints: Mapping[str, str] = field(default_factory=dict)


def priorities_of(objects: Iterable[ObjectiveObject], config: KubeConfig) -> dict[str, int]:
    """Priority by objective."""
    return {
        objective.metadata.name: objective.spec.priority or 0
        for objective in objects
        if _is_ours(objective.spec.pool_ref, config) and objective.metadata.deletion_timestamp is None
    }


def rewrites_of(objects: Iterable[RewriteObject], config: KubeConfig) -> Rewrites:
    """All rules; of objects of one age, those of the first name first."""
    rules: list[RewriteRule] = []
    complaints: dict[str, str] = {}
    meant = (
        rewrite
        for rewrite in objects
        if _is_ours(rewrite.spec.pool_ref, config) and rewrite.metadata.deletion_timestamp is None
    )
    # Times are written so that their order is that of their text.
    for rewrite in sorted(meant, key=lambda one: (one.metadata.creation_timestamp or "", one.metadata.name)):
        for number, rule in enumerate(rewrite.spec.rules):
            targets = [(target.model_rewrite, target.weight) for target in rule.targets]
            models = [match.model for match in rule.matches or ()]
            other = next((model.type for model in models if model.type not in (None, _EXACT)), None)
            if other is not None:
                complaints[rewrite.metadata.name] = f"rules[{number}]: matches are of type {_EXACT} only"
                continue
            if len({weight is None for _, weight in targets}) > 1:
                complaints[rewrite.metadata.name] = (
                    f"rules[{number}]: only some targets have a weight; those without are never used"
                )
            rules.append(RewriteRule(frozenset(model.value for model in models), targets))
    return Rewrites(rules, complaints)


def _is_ours(reference: PoolReference, config: KubeConfig) -> bool:
    """Whether a poolRef means our pool; what it leaves out is as its definition's defaults."""
    kind = reference.kind or "InferencePool"
    group = POOL_GROUP if reference.group is None else reference.group
    return (group, kind, reference.name) == (config.pool_group, "InferencePool", config.pool)
