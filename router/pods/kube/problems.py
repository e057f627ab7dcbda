"""What keeps discovery from its work: the state of watches, pods and event streams in; problems out.

What is normal for a moment, as a pod that is not Ready yet, is a problem only when it lasts. A problem is
told once, by a log line, a gauge and a Kubernetes Event, and again only when what it says has changed.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from threading import Event, Thread
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Gauge

from indexer import EngineState, StreamState
from router.config.kube import POOL_VERSIONS, KubeConfig
from router.errors import ClusterError
from router.pods.kube.client import KubeClient
from router.pods.pod_set import Pod

_log = logging.getLogger(__name__)

# What changes all the time is told no more often than this.
_TOLD_EVERY_S = 30.0
# Kubernetes forgets Events after an hour.
_POSTED_EVERY_S = 1800.0
_NAMES_MAX = 3
SETTLING_S = 5.0
REFUSED_S = 3.0
_UNREACHABLE_S = 10.0
BLIP_S = 2.0
UNLINKED_S = 15.0
_UNPROVED_S = 90.0
_BAD_REQUEST, _NOT_FOUND = 400, 404
_REFUSALS = (401, 403)
_COMPONENT = "kvroute-router"
_MESSAGE_CHARS_MAX = 1000
_RETRY_S = 5.0
_STOP_S = 2.0
_NEVER_POSTED = (400, 401, 403, 404, 422)


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
    """Facts that discovery knows now."""

    errors: Mapping[str, ClusterError | None] = field(default_factory=dict)  # why a watch fails, by its name
    pool_listed: bool = False
    pool: bool = False  # whether it is there and can be used
    pool_problem: str = ""  # why it cannot be used
    selector: str = ""  # that of the pods; "" while none is known
    pods_listed: bool = False
    pods: int = 0
    ready: int = 0
    bad: Mapping[Reason, Mapping[str, str]] = field(default_factory=dict)  # by reason and object


class Fact(NamedTuple):
    """Something that is wrong now, and a problem if it lasts; `what` tells it from others of its reason."""

    reason: Reason
    what: str
    text: str
    lasts_s: float = 0.0


def of_cluster(found: Found, config: KubeConfig, namespace: str) -> Iterator[Fact]:
    """Problems of watches, the pool, and the objects that they tell of."""
    version = f"{config.pool_group}/{POOL_VERSIONS[config.pool_group]}"
    for what, error in found.errors.items():
        if error is None:
            continue
        if error.status in _REFUSALS:
            yield Fact(Reason.FORBIDDEN, what, str(error))
        elif error.status == _NOT_FOUND and what == "pool":
            text = f"the API server has no InferencePool of {version}"
            advice = "install its definition (CRD), or find pods by --endpoint-selector"
            yield Fact(Reason.CRD_MISSING, what, f"{text}: {advice}")
        elif error.status == _BAD_REQUEST and what == "pods":
            yield Fact(Reason.BAD_POOL, what, f"the selector {found.selector} is refused: {error}")
        else:
            yield Fact(Reason.API_UNREACHABLE, "", str(error), BLIP_S)
    pool = f"InferencePool {config.pool} of {config.pool_group}"
    if config.pool and found.pool_listed and found.pool_problem:
        yield Fact(Reason.BAD_POOL, "", f"{pool} in namespace {namespace}: {found.pool_problem}")
    elif config.pool and found.pool_listed and not found.pool:
        yield Fact(Reason.POOL_NOT_FOUND, "", f"no {pool} in namespace {namespace}")
    if found.pods_listed and found.selector:
        which = f"of namespace {namespace} that match {found.selector}"
        if not found.pods and not found.bad.get(Reason.BAD_POD):
            yield Fact(Reason.NO_PODS_MATCH, "", f"there are no pods {which}", SETTLING_S)
        elif not found.ready:
            text = f"none of the {found.pods} pods {which} is Ready"
            yield Fact(Reason.PODS_NOT_READY, "", text, SETTLING_S)
    for reason, bad in found.bad.items():
        for name, what in bad.items():
            yield Fact(reason, name, f"{name}: {what}" if name else what)


_WHAT_IT_MEANS = {
    Reason.WRONG_TARGET_PORT: "Ready, but connections are refused: nothing listens at that port, or a "
    "NetworkPolicy rejects the router: ",
    Reason.POD_UNREACHABLE: "Ready, but the router gets no connection: a NetworkPolicy keeps it out, or the "
    "pod's node or process is gone: ",
}


def of_pods(
    pods: Iterable[Pod], engines: Collection[EngineState], probed: Collection[str] = ()
) -> Iterator[Fact]:
    """Problems of pods' ports and event streams.

    Args:
        engines: The event streams that are followed.
        probed: Addresses of endpoints whose port the pod's own readiness probe asks.
    """
    by_pod: dict[str, list[EngineState]] = {}
    for engine in engines:
        by_pod.setdefault(engine.stream.pod, []).append(engine)
    for pod in pods:
        which = f"{pod.name} ({pod.address})"
        if pod.entry.ready and pod.refused and pod.address not in probed:
            yield Fact(Reason.WRONG_TARGET_PORT, pod.address, which, REFUSED_S)
        elif pod.entry.ready and pod.refused:
            text = f"{which}: connection refused, though the pod's readiness probe reaches that port"
            yield Fact(Reason.POD_UNREACHABLE, pod.address, text, _UNREACHABLE_S)
        elif pod.entry.ready and pod.unreachable:
            text = f"{which}: connection timed out, or no route"
            yield Fact(Reason.POD_UNREACHABLE, pod.address, text, _UNREACHABLE_S)
        if pod.ready and (why := _without_events(pod, by_pod.get(pod.address, ()))) is not None:
            what, lasts_s = why
            yield Fact(Reason.ENGINE_WITHOUT_EVENTS, pod.address, f"{pod.name}: {what}", lasts_s)


def _without_events(pod: Pod, engines: Sequence[EngineState]) -> tuple[str, float] | None:
    """What is wrong with a pod's events, and how long that may be so; None for nothing."""
    if pod.sources is not None and pod.sources.off:
        return "the engine says that its KV events are off", 0.0
    if not engines:
        if pod.models is None:
            return "/v1/models tells no model, so its events would mean nothing", UNLINKED_S
        return "its events are not followed", UNLINKED_S
    for engine in engines:
        if not engine.linked:
            return f"nothing answers at {engine.stream.events_endpoint}", UNLINKED_S
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
        self._since_s: dict[tuple[Reason, str], float] = {}
        gauge = Gauge(
            "kvroute_discovery_problem",
            "1 while discovery is kept from its work by what the reason says.",
            ["reason"],
            registry=registry,
        )
        self._gauges = {reason: gauge.labels(reason) for reason in Reason}

    def see(self, facts: Iterable[Fact], now_s: float) -> None:
        """Takes all that is wrong now."""
        current = {}
        for reason, detail in self._lasting(facts, now_s).items():
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

    def _lasting(self, facts: Iterable[Fact], now_s: float) -> dict[Reason, str]:
        """By reason, the text of what has been wrong for so long that it is a problem."""
        since_s: dict[tuple[Reason, str], float] = {}
        texts: dict[Reason, list[str]] = {}
        for reason, what, text, lasts_s in facts:
            began_s = since_s[reason, what] = self._since_s.get((reason, what), now_s)
            if now_s - began_s >= lasts_s:
                texts.setdefault(reason, []).append(text)
        self._since_s = since_s
        return {reason: _WHAT_IT_MEANS.get(reason, "") + _some(each) for reason, each in texts.items()}


@dataclass(eq=False)
class EventPoster:
    """Posts the newest message of each reason as a Kubernetes Event, on a thread, until closed.

    What cannot be posted is tried again after some seconds, and others are posted meanwhile. The first
    failure is logged; the problem itself was logged before.
    """

    client: KubeClient
    # Tells the involvedObject of an Event when it is posted; None: none is posted.
    subject: Callable[[], Mapping[str, str] | None]

    def __post_init__(self) -> None:
        self._refused = False
        self._waiting: dict[Reason, str] = {}
        self._wake = Event()
        self._closing = False
        self._thread = Thread(target=self._run, name="kube-events", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends it, and drops what waits; idempotent."""
        self._closing = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_S)

    def post(self, reason: Reason, message: str) -> None:
        """Has an Event posted; "" when the problem is over. Never blocks."""
        self._waiting[reason] = message[:_MESSAGE_CHARS_MAX]
        self._wake.set()

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait(_RETRY_S if self._waiting else None)
            self._wake.clear()
            for reason in () if self._closing else list(self._waiting):
                message = self._waiting.pop(reason)
                if message and not self._try(reason, message):
                    # Again later, unless there is newer.
                    self._waiting.setdefault(reason, message)

    def _try(self, reason: Reason, message: str) -> bool:
        """Post a message; return False if it is to be tried again."""
        try:
            self._post(reason, message)
        except ClusterError as error:
            if not self._refused:
                self._refused = True
                _log.warning("Kubernetes Event cannot be posted: reason=%s error=%s", reason, error)
            return error.status in _NEVER_POSTED
        except Exception:
            _log.exception("Event %s", reason)
        return True

    def _post(self, reason: Reason, message: str) -> None:
        subject = self.subject()
        if subject is None:
            return
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        # The same words about the same object from the same router are one Event, counted up.
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
        self._refused = False
