"""What keeps discovery from its work: the state of watches, pods and event streams in; problems out.

What is normal for a moment, as a pod that is not Ready yet, is a problem only when it lasts. A problem is
told once, by a log line, a gauge and a Kubernetes Event, and again only when what it says has changed. Times
come in; who posts Events is handed in.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Gauge

from indexer import StreamState
from indexer.roster import EngineState
from router.errors import ClusterError
from router.kube.config import POOL_VERSIONS, KubeConfig
from router.pods import Pod

_log = logging.getLogger(__name__)

# What changes all the time is told no more often than this.
_TOLD_EVERY_S = 30.0
# Kubernetes forgets Events after an hour.
_POSTED_EVERY_S = 1800.0
_NAMES_MAX = 3
_SETTLING_S = 5.0
_REFUSED_S = 3.0
_UNREACHABLE_S = 10.0
_BLIP_S = 2.0
_UNLINKED_S = 15.0
_UNPROVED_S = 90.0
_NOT_FOUND = 404
_REFUSALS = (401, 403)


class Reason(StrEnum):
    """What can be wrong; docs/operations.md says what to do about each."""

    POOL_NOT_FOUND = "PoolNotFound"
    BAD_POOL = "BadPool"
    CRD_MISSING = "CrdMissing"
    FORBIDDEN = "Forbidden"
    API_UNREACHABLE = "ApiUnreachable"
    NO_PODS_MATCH = "NoPodsMatch"
    PODS_NOT_READY = "PodsNotReady"
    WRONG_TARGET_PORT = "WrongTargetPort"
    POD_UNREACHABLE = "PodUnreachable"
    ENGINE_WITHOUT_EVENTS = "EngineWithoutEvents"
    BAD_ANNOTATION = "BadAnnotation"
    BAD_POD = "BadPod"
    BAD_OBJECTIVE = "BadObjective"
    BAD_REWRITE = "BadRewrite"


# Each attempt fails in words of its own: the first ones stay.
_FIRST_WORDS_STAY = frozenset({Reason.API_UNREACHABLE})


@dataclass(frozen=True, slots=True)
class Found:
    """What discovery knows now.

    Attributes:
        errors: By what is watched, why that fails.
        pool: Whether it is there and can be used; else `pool_problem` may say why it cannot.
        selector: That of the pods; "" while none is known.
        probed: Addresses of endpoints whose port the pod's own readiness probe asks.
        bad_pods, bad_annotations, bad_objectives, bad_rewrites: By name, what is wrong.
    """

    errors: Mapping[str, ClusterError] = field(default_factory=dict)
    pool_listed: bool = False
    pool: bool = False
    pool_problem: str = ""
    selector: str = ""
    pods_listed: bool = False
    pods: int = 0
    ready: int = 0
    probed: Collection[str] = ()
    bad_pods: Mapping[str, str] = field(default_factory=dict)
    bad_annotations: Mapping[str, str] = field(default_factory=dict)
    bad_objectives: Mapping[str, str] = field(default_factory=dict)
    bad_rewrites: Mapping[str, str] = field(default_factory=dict)


class _Fact(NamedTuple):
    """Something that is wrong now, and a problem if it lasts; `what` tells it from others of its reason."""

    reason: Reason
    what: str
    text: str
    lasts_s: float = 0.0


class Diagnosis:
    """Remembers since when things are as they are."""

    def __init__(self, config: KubeConfig, namespace: str) -> None:
        self._config = config
        self._namespace = namespace
        self._since_s: dict[tuple[Reason, str], float] = {}

    def problems(
        self, found: Found, pods: Iterable[Pod], engines: Collection[EngineState], now_s: float
    ) -> dict[Reason, str]:
        """All that is wrong now; `engines` are the event streams that are followed."""
        since_s: dict[tuple[Reason, str], float] = {}
        texts: dict[Reason, list[str]] = {}
        for facts in (self._of_cluster(found), _of_pods(found, pods, engines)):
            for reason, what, text, lasts_s in facts:
                began_s = since_s[reason, what] = self._since_s.get((reason, what), now_s)
                if now_s - began_s >= lasts_s:
                    texts.setdefault(reason, []).append(text)
        self._since_s = since_s
        return {reason: _WHAT_IT_MEANS.get(reason, "") + _some(each) for reason, each in texts.items()}

    def _of_cluster(self, found: Found) -> Iterator[_Fact]:
        config, namespace = self._config, self._namespace
        version = f"{config.pool_group}/{POOL_VERSIONS[config.pool_group]}"
        for what, error in found.errors.items():
            if error.status in _REFUSALS:
                yield _Fact(Reason.FORBIDDEN, what, str(error))
            elif error.status == _NOT_FOUND and what == "pool":
                text = f"the API server has no InferencePool of {version}"
                advice = "install its definition (CRD), or find pods by --endpoint-selector"
                yield _Fact(Reason.CRD_MISSING, what, f"{text}: {advice}")
            else:
                yield _Fact(Reason.API_UNREACHABLE, "", str(error), _BLIP_S)
        pool = f"InferencePool {config.pool} of {config.pool_group}"
        if config.pool and found.pool_listed and found.pool_problem:
            yield _Fact(Reason.BAD_POOL, "", f"{pool} in namespace {namespace}: {found.pool_problem}")
        elif config.pool and found.pool_listed and not found.pool:
            yield _Fact(Reason.POOL_NOT_FOUND, "", f"no {pool} in namespace {namespace}")
        if found.pods_listed and found.selector:
            which = f"of namespace {namespace} that match {found.selector}"
            if not found.pods and not found.bad_pods:
                yield _Fact(Reason.NO_PODS_MATCH, "", f"there are no pods {which}", _SETTLING_S)
            elif not found.ready:
                text = f"none of the {found.pods} pods {which} is Ready"
                yield _Fact(Reason.PODS_NOT_READY, "", text, _SETTLING_S)
        for reason, bad in (
            (Reason.BAD_POD, found.bad_pods),
            (Reason.BAD_ANNOTATION, found.bad_annotations),
            (Reason.BAD_OBJECTIVE, found.bad_objectives),
            (Reason.BAD_REWRITE, found.bad_rewrites),
        ):
            for name, what in bad.items():
                yield _Fact(reason, name, f"{name}: {what}" if name else what)


_WHAT_IT_MEANS = {
    Reason.WRONG_TARGET_PORT: "Ready, but connections are refused: nothing listens at that port, or a "
    "NetworkPolicy rejects the router: ",
    Reason.POD_UNREACHABLE: "Ready, but the router gets no connection: a NetworkPolicy keeps it out, or the "
    "pod's node or process is gone: ",
}


def _of_pods(found: Found, pods: Iterable[Pod], engines: Collection[EngineState]) -> Iterator[_Fact]:
    by_pod: dict[str, list[EngineState]] = {}
    for engine in engines:
        by_pod.setdefault(engine.stream.pod, []).append(engine)
    for pod in pods:
        which = f"{pod.name} ({pod.address})"
        if pod.entry.ready and pod.refused and pod.address not in found.probed:
            yield _Fact(Reason.WRONG_TARGET_PORT, pod.address, which, _REFUSED_S)
        elif pod.entry.ready and pod.refused:
            text = f"{which}: connection refused, though the pod's readiness probe reaches that port"
            yield _Fact(Reason.POD_UNREACHABLE, pod.address, text, _UNREACHABLE_S)
        elif pod.entry.ready and pod.unreachable:
            text = f"{which}: connection timed out, or no route"
            yield _Fact(Reason.POD_UNREACHABLE, pod.address, text, _UNREACHABLE_S)
        if pod.ready and (why := _without_events(pod, by_pod.get(pod.address, ()))) is not None:
            what, lasts_s = why
            yield _Fact(Reason.ENGINE_WITHOUT_EVENTS, pod.address, f"{pod.name}: {what}", lasts_s)


def _without_events(pod: Pod, engines: Sequence[EngineState]) -> tuple[str, float] | None:
    """What is wrong with a pod's events, and how long that may be so; None for nothing."""
    if pod.sources is not None and pod.sources.off:
        return "the engine says that its KV events are off", 0.0
    if not engines:
        if pod.models is None:
            return "/v1/models tells no model, so its events would mean nothing", _UNLINKED_S
        return "its events are not followed", _UNLINKED_S
    for engine in engines:
        if not engine.linked:
            return f"nothing answers at {engine.stream.events_endpoint}", _UNLINKED_S
        if engine.state is not StreamState.EXACT:
            return f"its events prove nothing: {engine.state} ({engine.reason})", _UNPROVED_S
    return None


def _some(items: Sequence[str]) -> str:
    texts = sorted(set(items))
    shown, more = "; ".join(texts[:_NAMES_MAX]), len(texts) - _NAMES_MAX
    return f"{shown}; and {more} more" if more > 0 else shown


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem that there is, for a person, and when it was first seen, last told and last posted."""

    detail: str
    since_s: float
    told_s: float
    posted_s: float


class Problems:
    """All problems; to be used by one thread, `current` by any.

    Args:
        post: Told of each problem that is told: the reason and what is wrong; "" when it is over.
    """

    def __init__(self, registry: CollectorRegistry, post: Callable[[Reason, str], None]) -> None:
        self.current: Mapping[Reason, Problem] = {}
        self._post = post
        gauge = Gauge(
            "kvroute_discovery_problem",
            "1 while discovery is kept from its work by what the reason says.",
            ["reason"],
            registry=registry,
        )
        self._gauges = {reason: gauge.labels(reason) for reason in Reason}

    def see(self, found: Mapping[Reason, str], now_s: float) -> None:
        current = {}
        for reason, detail in found.items():
            known = self.current.get(reason)
            is_told = known is not None and (
                known.detail == detail or reason in _FIRST_WORDS_STAY or now_s - known.told_s < _TOLD_EVERY_S
            )
            if known is None or not is_told:
                _log.warning("%s: %s", reason, detail)
                self._gauges[reason].set(1)
                since_s = now_s if known is None else known.since_s
                known = Problem(detail, since_s, told_s=now_s, posted_s=-math.inf)
            if now_s - known.posted_s >= _POSTED_EVERY_S:
                self._post(reason, known.detail)
                known = replace(known, posted_s=now_s)
            current[reason] = known
        for reason in self.current.keys() - current.keys():
            _log.info("%s: over", reason)
            self._gauges[reason].set(0)
            self._post(reason, "")
        self.current = current
