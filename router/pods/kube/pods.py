"""Conversion of Kubernetes objects to pod entries, pools, priorities and rewrite rules. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from indexer.config import PODS_MAX
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
from router.config.kube import EVENT_PORT_MAX, POOL_GROUP, KubeConfig
from router.config.picker_file import RewriteRule
from router.pods.kube.objects import (
    BadObjectError,
    ObjectiveObject,
    OldPoolObject,
    PodObject,
    PoolObject,
    RewriteObject,
)

ANNOTATION_PREFIX = "kvroute.dev/"
# Annotations that list the target ports in use; the first one present applies.
ACTIVE_PORTS = ("llm-d.ai/active-ports", "inference.networking.k8s.io/active-ports")
_LABEL_PREFIX = "kvroute.io/"
_LABELS = frozenset({*EVENT_LABELS, *PORT_LABELS, METRICS_PATH_LABEL, MODEL_LABEL})
_OVER = ("Succeeded", "Failed")
_EXACT = "Exact"


@dataclass(frozen=True, slots=True)
class PodEndpoints:
    """Endpoints of a pod, one per target port."""

    entries: tuple[PodEntry, ...] = ()  # present while the pod is not Ready too, because its cache persists
    problem: str = ""  # description of an invalid annotation, which is ignored
    probed: tuple[str, ...] = ()  # addresses of endpoints whose port a readiness probe of the pod checks


def endpoints_of(pod: PodObject, rules: KubeConfig) -> PodEndpoints:
    """Return a pod's endpoints, one per target port in use; none without an address or after its end."""
    status, metadata = pod.status, pod.metadata
    if status is None or metadata.deletion_timestamp is not None or status.phase in _OVER:
        return PodEndpoints()
    if (address := _address(status.pod_ip)) is None:
        return PodEndpoints()
    annotations = metadata.annotations or {}
    ports, port_problem = _active_ports(annotations, rules.target_ports)
    given, problem = _own_labels(annotations, rules)
    labels = {name: value for name, value in (metadata.labels or {}).items() if name not in _LABELS}
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
                epoch=_epoch(pod),
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
    return PodEndpoints(tuple(entries), port_problem or problem, probed)


def is_ready(pod: PodObject) -> bool:
    """Return whether the pod's condition Ready is true."""
    conditions = pod.status.conditions if pod.status is not None else None
    return any(condition.type == "Ready" and condition.status == "True" for condition in conditions or ())


def declared(pods: Iterable[tuple[PodObject, PodEndpoints]]) -> tuple[tuple[PodEntry, ...], int]:
    """Return all endpoints by name, each address once, and the number left out above PODS_MAX.

    If two pods have one address, the Ready one is used, else the younger: the other pod has ended and its
    deletion has not arrived yet.
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
    """Return the ports that the readiness probes of the pod's containers check."""
    ports: set[int] = set()
    for container in (pod.spec.containers if pod.spec is not None else None) or ():
        if (probe := container.readiness_probe) is None:
            continue
        by_name = {port.name: port.container_port for port in container.ports or ()}
        for asked in (probe.http_get, probe.tcp_socket, probe.grpc):
            if asked is not None:
                # An unknown port name becomes 0, which matches no endpoint.
                ports.add(asked.port if isinstance(asked.port, int) else by_name.get(asked.port, 0))
    return ports


def _address(text: str | None) -> str | None:
    try:
        return str(ipaddress.ip_address(text or ""))
    except ValueError:
        return None


def _epoch(pod: PodObject) -> str:
    """Return an id of the pod and its current containers; a restarted container has an empty cache."""
    containers = (pod.status.container_statuses if pod.status is not None else None) or ()
    epochs = sorted(f"{one.name}:{one.restart_count}:{one.container_id or ''}" for one in containers)
    return " ".join([pod.metadata.uid, *epochs])


def _active_ports(annotations: Mapping[str, str], ports: Sequence[int]) -> tuple[Collection[int], str]:
    name = next((name for name in ACTIVE_PORTS if name in annotations), None)
    if name is None:
        return ports, ""
    items = [item for item in map(str.strip, annotations[name].split(",")) if item]
    used = [port for port in ports if str(port) in items]
    unknown = next((item for item in items if item not in map(str, ports)), None)
    return used, f"{name}: {unknown[:20]!r} is not a target port of the pool" if unknown else ""


def _own_labels(annotations: Mapping[str, str], rules: KubeConfig) -> tuple[dict[str, str], str]:
    """Return the annotations as labels of a pods file, and the problem of the first invalid one or ""."""
    given: dict[str, str] = {}
    first_problem = ""
    for label in sorted(_LABELS):
        name = ANNOTATION_PREFIX + label.removeprefix(_LABEL_PREFIX)
        value = annotations.get(name)
        if value is None:
            continue
        problem = label_problem(label, value) or _unusable(label, value, rules)
        if problem is None:
            given[label] = value
        else:
            first_problem = first_problem or f"{name}: {problem[:200]}"
    if given.get(RANKS_LABEL, "1") != "1" and given.get(SNAPSHOT_LABEL) == "true":
        del given[SNAPSHOT_LABEL]
        snapshot = f"{ANNOTATION_PREFIX}kv-snapshot: not supported with several ranks behind one port"
        first_problem = first_problem or snapshot
    return given, first_problem


def _unusable(label: str, value: str, rules: KubeConfig) -> str | None:
    """Return why a well-formed value cannot be used with these settings, or None."""
    if label == EVENTS_LABEL and value == "connects" and not rules.events_bind:
        return "needs the router's flag --events-bind"
    if label == RANKS_LABEL and int(value) > 1 and len(rules.target_ports) > 1:
        return "must be 1 for a pool with several target ports, each of which is one rank"
    if label in PORT_LABELS and int(value) > EVENT_PORT_MAX:
        return f"must be at most {EVENT_PORT_MAX}, to leave room for data-parallel ranks"
    return None


def _of_rank(labels: Mapping[str, str], rank: int) -> dict[str, str]:
    """Return the labels of the endpoint with this rank, whose ports are offset by the rank."""
    return {name: str(int(value) + rank) if name in PORT_LABELS else value for name, value in labels.items()}


@dataclass(frozen=True, slots=True)
class Pool:
    """Label selector and target ports of an InferencePool; Kubernetes Events refer to its `uid`."""

    name: str
    uid: str
    selector: str
    ports: tuple[int, ...]


def pool_of(pool: PoolObject | OldPoolObject) -> Pool | None:
    """Convert an InferencePool; return None while it is being deleted.

    Raises:
        BadObjectError: The selector is empty.
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
        raise BadObjectError("spec.selector: must not be empty: it would select every pod of the namespace")
    selector = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
    return Pool(metadata.name, metadata.uid, selector, ports)


@dataclass(frozen=True, slots=True)
class Rewrites:
    """Rules of all InferenceModelRewrites, those of the oldest object first."""

    rules: Sequence[RewriteRule] = ()
    problems: Mapping[str, str] = field(default_factory=dict)  # by object name, what is wrong with its rules


def priorities_of(objects: Iterable[ObjectiveObject], config: KubeConfig) -> dict[str, int]:
    """Return the priority of each objective of this pool, by name."""
    return {one.metadata.name: one.spec.priority or 0 for one in objects if _is_ours(one, config)}


def rewrites_of(objects: Iterable[RewriteObject], config: KubeConfig) -> Rewrites:
    """Return the rules of all rewrites of this pool, ordered by age and name of their objects."""
    rules: list[RewriteRule] = []
    problems: dict[str, str] = {}
    ours = (rewrite for rewrite in objects if _is_ours(rewrite, config))
    # RFC 3339 timestamps sort as text.
    for rewrite in sorted(ours, key=lambda one: (one.metadata.creation_timestamp or "", one.metadata.name)):
        for number, rule in enumerate(rewrite.spec.rules):
            targets = [(target.model_rewrite, target.weight) for target in rule.targets]
            models = [match.model for match in rule.matches or ()]
            name, where = rewrite.metadata.name, f"rules[{number}]"
            if any(model.type not in (None, _EXACT) for model in models):
                problems[name] = f"{where}: only matches of type {_EXACT} are supported"
                continue
            if len({weight is None for _, weight in targets}) > 1:
                problems[name] = f"{where}: only some targets have a weight; those without are never used"
            rules.append(RewriteRule(frozenset(model.value for model in models), targets))
    return Rewrites(rules, problems)


def _is_ours(one: ObjectiveObject | RewriteObject, config: KubeConfig) -> bool:
    """Return whether an object that is not being deleted refers to the configured pool."""
    reference = one.spec.pool_ref
    # Omitted fields have the defaults of the CRD.
    kind = reference.kind or "InferencePool"
    group = POOL_GROUP if reference.group is None else reference.group
    is_pool = (group, kind, reference.name) == (config.pool_group, "InferencePool", config.pool)
    return is_pool and one.metadata.deletion_timestamp is None
