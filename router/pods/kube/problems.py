"""Detection and reporting of discovery problems, from the state of watches, pods and event streams.

A state that is normal for a moment, such as a pod that is not Ready yet, is a problem only if it lasts.
A problem is reported once, by a log line, a gauge and a Kubernetes Event, and again when its text changes.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from threading import Event, Thread
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Gauge

from indexer import EVENTS_OFF, EngineState, FaultKind, StreamState
from router.config.kube import POOL_VERSIONS, KubeConfig
from router.errors import ClusterError
from router.pods.kube.client import KubeClient
from router.pods.pod_set import Pod

_log = logging.getLogger(__name__)

# Minimum time between two log lines about one reason whose text changes.
_LOG_INTERVAL_S = 30.0
# Repeat before Kubernetes expires Events, by default after an hour.
_POSTED_EVERY_S = 1800.0
_NAMES_MAX = 3
SETTLING_S = 5.0
REFUSED_S = 3.0
_UNREACHABLE_S = 10.0
API_DOWN_S = 2.0
UNLINKED_S = 15.0
_NOT_EXACT_S = 90.0
_BAD_REQUEST, _NOT_FOUND = 400, 404
_REFUSALS = (401, 403)
_COMPONENT = "kvroute-router"
_MESSAGE_CHARS_MAX = 1000
_RETRY_S = 5.0
_STOP_S = 2.0
_NEVER_POSTED = (400, 401, 403, 404, 422)


class Reason(StrEnum):
    """Reason of a problem; docs/operations.md says what to do about each."""

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
    POD_STALLED = "PodStalled"
    ADAPTER_RELOADED = "AdapterReloaded"
    ENGINE_WITHOUT_CACHE = "EngineWithoutCache"
    TIER_NOT_PROVEN = "TierNotProven"
    BAD_ANNOTATION = "BadAnnotation"
    BAD_POD = "BadPod"
    BAD_OBJECTIVE = "BadObjective"
    BAD_REWRITE = "BadRewrite"


# The error text differs with each attempt, so only the first one is reported.
_KEEP_FIRST_TEXT = frozenset({Reason.API_UNREACHABLE})


@dataclass(frozen=True, slots=True)
class DiscoveryState:
    """Current state of discovery."""

    errors: Mapping[str, ClusterError | None] = field(default_factory=dict)  # last error of each watch
    pool_listed: bool = False
    pool: bool = False  # whether the InferencePool exists and is valid
    pool_problem: str = ""  # why the InferencePool is invalid
    selector: str = ""  # label selector of the pods; "" while unknown
    pods_listed: bool = False
    pods: int = 0
    ready: int = 0
    bad: Mapping[Reason, Mapping[str, str]] = field(default_factory=dict)  # problem by reason and object


class Symptom(NamedTuple):
    """Abnormal observation, which becomes a problem when it lasts."""

    reason: Reason
    what: str  # object concerned; reason and object identify the symptom over time
    text: str
    lasts_s: float = 0.0  # minimum duration of a problem in seconds


def cluster_symptoms(state: DiscoveryState, config: KubeConfig, namespace: str) -> Iterator[Symptom]:
    """Yield symptoms of watches, the pool and the watched objects."""
    version = f"{config.pool_group}/{POOL_VERSIONS[config.pool_group]}"
    for what, error in state.errors.items():
        if error is None:
            continue
        if error.status in _REFUSALS:
            yield Symptom(Reason.FORBIDDEN, what, str(error))
        elif error.status == _NOT_FOUND and what == "pool":
            text = f"the API server has no InferencePool of {version}"
            advice = "install the CRD, or select pods by --endpoint-selector"
            yield Symptom(Reason.CRD_MISSING, what, f"{text}: {advice}")
        elif error.status == _BAD_REQUEST and what == "pods":
            yield Symptom(Reason.BAD_POOL, what, f"invalid selector {state.selector}: {error}")
        else:
            yield Symptom(Reason.API_UNREACHABLE, "", str(error), API_DOWN_S)
    pool = f"InferencePool {config.pool} of {config.pool_group}"
    if config.pool and state.pool_listed and state.pool_problem:
        yield Symptom(Reason.BAD_POOL, "", f"{pool} in namespace {namespace}: {state.pool_problem}")
    elif config.pool and state.pool_listed and not state.pool:
        yield Symptom(Reason.POOL_NOT_FOUND, "", f"no {pool} in namespace {namespace}")
    if state.pods_listed and state.selector:
        which = f"of namespace {namespace} that match {state.selector}"
        if not state.pods and not state.bad.get(Reason.BAD_POD):
            yield Symptom(Reason.NO_PODS_MATCH, "", f"no pods {which}", SETTLING_S)
        elif not state.ready:
            text = f"none of the {state.pods} pods {which} is Ready"
            yield Symptom(Reason.PODS_NOT_READY, "", text, SETTLING_S)
    for reason, bad in state.bad.items():
        for name, what in bad.items():
            yield Symptom(reason, name, f"{name}: {what}" if name else what)


_MEANING = {
    Reason.WRONG_TARGET_PORT: "Ready, but connections are refused: nothing listens at that port, or a "
    "NetworkPolicy rejects the router: ",
    Reason.ADAPTER_RELOADED: "Adapters were loaded again under their old names, so prefixes of the old "
    "weights may hit: ",
    Reason.POD_UNREACHABLE: "Ready, but the router gets no connection: a NetworkPolicy keeps it out, or the "
    "pod's node or process is gone: ",
}


def pod_symptoms(
    pods: Iterable[Pod], engines: Collection[EngineState], probed: Collection[str] = ()
) -> Iterator[Symptom]:
    """Yield symptoms of pods' ports and event streams; `probed`: endpoints that readiness probes check."""
    by_pod: dict[str, list[EngineState]] = {}
    for engine in engines:
        by_pod.setdefault(engine.stream.pod, []).append(engine)
    for pod in pods:
        which = f"{pod.name} ({pod.address})"
        if pod.entry.ready and pod.refused and pod.address not in probed:
            yield Symptom(Reason.WRONG_TARGET_PORT, pod.address, which, REFUSED_S)
        elif pod.entry.ready and (pod.refused or pod.unreachable):
            refused = "connection refused, although the pod's readiness probe reaches the port"
            what = refused if pod.refused else "connection timed out, or no route to host"
            yield Symptom(Reason.POD_UNREACHABLE, pod.address, f"{which}: {what}", _UNREACHABLE_S)
        if pod.stalled:
            yield Symptom(Reason.POD_STALLED, pod.address, f"{which}: {pod.why}")
        if pod.reloaded:
            text = f"{pod.name}: {', '.join(sorted(pod.reloaded)[:_NAMES_MAX])}"
            yield Symptom(Reason.ADAPTER_RELOADED, pod.address, text)
        if pod.ready and (why := _without_events(pod, by_pod.get(pod.address, ()))) is not None:
            what, lasts_s = why
            yield Symptom(Reason.ENGINE_WITHOUT_EVENTS, pod.address, f"{pod.name}: {what}", lasts_s)
        for fault in pod.faults if pod.ready else ():
            if fault is not EVENTS_OFF:
                unproven = fault.kind is FaultKind.TIER_NOT_PROVEN
                reason = Reason.TIER_NOT_PROVEN if unproven else Reason.ENGINE_WITHOUT_CACHE
                yield Symptom(reason, f"{pod.address} {fault.kind}", f"{pod.name}: {fault.text}")


def _without_events(pod: Pod, engines: Sequence[EngineState]) -> tuple[str, float] | None:
    """Return what is wrong with a pod's events and how long it must last in seconds, or None."""
    if pod.sources is not None and pod.sources.off:
        return EVENTS_OFF.text, 0.0
    if not engines:
        if pod.models is None:
            return "/v1/models lists no model, which is needed to interpret events", UNLINKED_S
        return "its events are not followed", UNLINKED_S
    for engine in engines:
        if not engine.linked:
            return f"no connection to {engine.stream.events_endpoint}", UNLINKED_S
        if engine.state is not StreamState.EXACT and engine.reason != FaultKind.TIER_NOT_PROVEN:
            return f"its event stream is {engine.state}: {engine.reason}", _NOT_EXACT_S
    return None


def _abridged(items: Sequence[str]) -> str:
    texts = sorted(set(items))
    shown, more = "; ".join(texts[:_NAMES_MAX]), len(texts) - _NAMES_MAX
    return f"{shown}; and {more} more" if more > 0 else shown


@dataclass(frozen=True, slots=True)
class Problem:
    """Current problem of one reason; times are seconds of the caller's clock."""

    detail: str
    since_s: float
    logged_s: float
    posted_s: float  # when it was last posted as a Kubernetes Event


@dataclass(eq=False)
class Problems:
    """Current problems by reason. Only one thread may call `update`; any thread may read `current`."""

    registry: InitVar[CollectorRegistry]
    post: Callable[[Reason, str], None]  # called with reason and text of a reported problem; "": it ended

    def __post_init__(self, registry: CollectorRegistry) -> None:
        self.current: Mapping[Reason, Problem] = {}
        self._since_s: dict[tuple[Reason, str], float] = {}
        gauge = Gauge(
            "kvroute_discovery_problem",
            "1 while discovery has the problem named by the reason.",
            ["reason"],
            registry=registry,
        )
        self._gauges = {reason: gauge.labels(reason) for reason in Reason}

    def update(self, symptoms: Iterable[Symptom], now_s: float) -> None:
        """Replace all current symptoms, and report problems that began, changed or ended."""
        current = {}
        for reason, detail in self._lasting(symptoms, now_s).items():
            known = self.current.get(reason)
            is_logged = known is not None and (
                known.detail == detail
                or reason in _KEEP_FIRST_TEXT
                or now_s - known.logged_s < _LOG_INTERVAL_S
            )
            if known is None or not is_logged:
                _log.warning("discovery problem: reason=%s detail=%s", reason, detail)
                self._gauges[reason].set(1)
                since_s = now_s if known is None else known.since_s
                known = Problem(detail, since_s, logged_s=now_s, posted_s=-math.inf)
            if now_s - known.posted_s >= _POSTED_EVERY_S:
                self.post(reason, known.detail)
                known = replace(known, posted_s=now_s)
            current[reason] = known
        for reason in self.current.keys() - current.keys():
            _log.info("discovery problem ended: reason=%s", reason)
            self._gauges[reason].set(0)
            self.post(reason, "")
        self.current = current

    def _lasting(self, symptoms: Iterable[Symptom], now_s: float) -> dict[Reason, str]:
        """Return, by reason, the text of symptoms that have lasted long enough to be problems."""
        since_s: dict[tuple[Reason, str], float] = {}
        texts: dict[Reason, list[str]] = {}
        for reason, what, text, lasts_s in symptoms:
            began_s = since_s[reason, what] = self._since_s.get((reason, what), now_s)
            if now_s - began_s >= lasts_s:
                texts.setdefault(reason, []).append(text)
        self._since_s = since_s
        return {reason: _MEANING.get(reason, "") + _abridged(each) for reason, each in texts.items()}


@dataclass(eq=False)
class EventPoster:
    """Thread that posts the newest message of each reason as a Kubernetes Event.

    A failed post is retried after some seconds without delaying others. Only the first failure is logged.
    """

    client: KubeClient
    # Returns the involvedObject of an Event, or None if no Event should be posted.
    subject: Callable[[], Mapping[str, str] | None]

    def __post_init__(self) -> None:
        self._failed = False
        self._queue: dict[Reason, str] = {}
        self._wake = Event()
        self._closing = False
        self._thread = Thread(target=self._run, name="kube-events", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and drop queued messages; idempotent."""
        self._closing = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_S)

    def post(self, reason: Reason, message: str) -> None:
        """Queue an Event; an empty message cancels a queued one. Never blocks."""
        self._queue[reason] = message[:_MESSAGE_CHARS_MAX]
        self._wake.set()

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait(_RETRY_S if self._queue else None)
            self._wake.clear()
            for reason in () if self._closing else list(self._queue):
                message = self._queue.pop(reason)
                if message and not self._try(reason, message):
                    # Retry later, unless a newer message was queued.
                    self._queue.setdefault(reason, message)

    def _try(self, reason: Reason, message: str) -> bool:
        """Post a message; return False if it should be retried."""
        try:
            self._post(reason, message)
        except ClusterError as error:
            if not self._failed:
                self._failed = True
                _log.warning("posting Kubernetes Event failed: reason=%s error=%s", reason, error)
            return error.status in _NEVER_POSTED
        except Exception:
            _log.exception("posting Kubernetes Event failed: reason=%s", reason)
        return True

    def _post(self, reason: Reason, message: str) -> None:
        subject = self.subject()
        if subject is None:
            return
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        # Equal messages of one router about one object are one Event with an increasing count.
        reporter = os.environ.get("POD_NAME", _COMPONENT)
        words = "\0".join([subject["uid"], reason, message, reporter])
        name = f"{subject['name'][:200]}.{hashlib.sha256(words.encode()).hexdigest()[:16]}"
        event: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": subject["namespace"]},
            "involvedObject": subject,
            "reason": str(reason),
            "message": message,
            "type": "Warning",
            "firstTimestamp": now,
            "lastTimestamp": now,
            "source": {"component": _COMPONENT},
            "reportingComponent": _COMPONENT,
            "reportingInstance": reporter,
        }
        self.client.post_event(subject["namespace"], event)
        self._failed = False
