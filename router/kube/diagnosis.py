"""What keeps discovery from its work: the state of watches, pods and event streams in, problems out. Pure.

Time comes in: what is normal for a moment, as a pod that is not Ready yet, is a problem only when it lasts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from indexer import StreamState
from indexer.roster import EngineState
from router.errors import ClusterError
from router.kube.config import POOL_VERSIONS, KubeConfig
from router.kube.problems import Reason
from router.pods import Pod

_NAMES_MAX = 3
_SETTLING_S = 5.0
_REFUSED_S = 3.0
_UNREACHABLE_S = 10.0
_BLIP_S = 2.0
_UNLINKED_S = 15.0
_UNPROVED_S = 90.0
_UNREACHED = {
    True: "connection refused, though the pod's readiness probe reaches that port",
    False: "connection timed out, or no route",
}
_NOT_FOUND = 404
_REFUSALS = (401, 403)


@dataclass(frozen=True, slots=True)
class Found:
    """What discovery knows now.

    Attributes:
        errors: By what is watched, why that fails.
        pool_listed: Whether it is known if there is a pool.
        pool: Whether it is there and can be used.
        pool_problem: Why it cannot.
        selector: That of the pods; "" while none is known.
        pods_listed: Whether the pods are known.
        pods: How many match.
        ready: How many of them are Ready.
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


class Diagnosis:
    """Remembers since when things are as they are.

    Args:
        namespace: Of the pool and its pods.
    """

    def __init__(self, config: KubeConfig, namespace: str) -> None:
        self._config = config
        self._namespace = namespace
        self._since_s: dict[tuple[Reason, str], float] = {}

    def problems(
        self, found: Found, pods: Iterable[Pod], engines: Collection[EngineState], now_s: float
    ) -> dict[Reason, str]:
        """All that is wrong now.

        Args:
            pods: The endpoints as they were probed.
            engines: The event streams that are followed.
        """
        seen: dict[tuple[Reason, str], float] = {}

        def lasts(reason: Reason, what: str, at_least_s: float) -> bool:
            since_s = seen[reason, what] = self._since_s.get((reason, what), now_s)
            return now_s - since_s >= at_least_s

        problems = _of_watches(found.errors, self._config)
        if Reason.API_UNREACHABLE in problems and not lasts(Reason.API_UNREACHABLE, "", _BLIP_S):
            del problems[Reason.API_UNREACHABLE]
        problems |= self._of_pool(found)
        if found.pods_listed and found.selector:
            which = f"of namespace {self._namespace} that match {found.selector}"
            if not found.pods and not found.bad_pods:
                if lasts(Reason.NO_PODS_MATCH, "", _SETTLING_S):
                    problems[Reason.NO_PODS_MATCH] = f"there are no pods {which}"
            elif not found.ready and lasts(Reason.PODS_NOT_READY, "", _SETTLING_S):
                problems[Reason.PODS_NOT_READY] = f"none of the {found.pods} pods {which} is Ready"
        problems |= _of_pods(found, pods, engines, lasts)
        self._since_s = seen
        return problems | _of_objects(found)

    def _of_pool(self, found: Found) -> dict[Reason, str]:
        name = f"InferencePool {self._config.pool} of {self._config.pool_group}"
        if not self._config.pool or not found.pool_listed:
            return {}
        if found.pool_problem:
            return {Reason.BAD_POOL: f"{name} in namespace {self._namespace}: {found.pool_problem}"}
        return {} if found.pool else {Reason.POOL_NOT_FOUND: f"no {name} in namespace {self._namespace}"}


def _of_watches(errors: Mapping[str, ClusterError], config: KubeConfig) -> dict[Reason, str]:
    sorted_out: dict[Reason, list[str]] = {}
    for what, error in sorted(errors.items()):
        if error.status in _REFUSALS:
            reason = Reason.FORBIDDEN
        elif error.status == _NOT_FOUND and what == "pool":
            reason = Reason.CRD_MISSING
        else:
            reason = Reason.API_UNREACHABLE
        sorted_out.setdefault(reason, []).append(str(error))
    if Reason.CRD_MISSING in sorted_out:
        sorted_out[Reason.CRD_MISSING] = [
            f"the API server has no InferencePool of {config.pool_group}/{POOL_VERSIONS[config.pool_group]}: "
            "install its definition (CRD), or find pods by --endpoint-selector"
        ]
    return {reason: "; ".join(dict.fromkeys(texts)) for reason, texts in sorted_out.items()}


def _of_pods(
    found: Found,
    pods: Iterable[Pod],
    engines: Collection[EngineState],
    lasts: Callable[[Reason, str, float], bool],
) -> dict[Reason, str]:
    refusing, unreachable, silent = [], [], []
    by_pod: dict[str, list[EngineState]] = {}
    for engine in engines:
        by_pod.setdefault(engine.stream.pod, []).append(engine)
    for pod in pods:
        if pod.entry.ready and (pod.refused or pod.unreachable):
            wrong_port = pod.refused and pod.address not in found.probed
            if wrong_port and lasts(Reason.WRONG_TARGET_PORT, pod.address, _REFUSED_S):
                refusing.append(f"{pod.name} ({pod.address})")
            if not wrong_port and lasts(Reason.POD_UNREACHABLE, pod.address, _UNREACHABLE_S):
                unreachable.append(f"{pod.name} ({pod.address}): {_UNREACHED[pod.refused]}")
        if pod.ready and (why := _without_events(pod, by_pod.get(pod.address, ()))) is not None:
            what, at_least_s = why
            if lasts(Reason.ENGINE_WITHOUT_EVENTS, pod.address, at_least_s):
                silent.append(f"{pod.name}: {what}")
    problems = {
        Reason.WRONG_TARGET_PORT: (
            "Ready, but connections are refused: nothing listens at that port, or a NetworkPolicy rejects "
            "the router: ",
            refusing,
        ),
        Reason.POD_UNREACHABLE: (
            "Ready, but the router gets no connection: a NetworkPolicy keeps it out, or the pod's node or "
            "process is gone: ",
            unreachable,
        ),
        Reason.ENGINE_WITHOUT_EVENTS: ("", silent),
    }
    return {reason: text + _some(names) for reason, (text, names) in problems.items() if names}


def _of_objects(found: Found) -> dict[Reason, str]:
    by_reason = {
        Reason.BAD_POD: found.bad_pods,
        Reason.BAD_ANNOTATION: found.bad_annotations,
        Reason.BAD_OBJECTIVE: found.bad_objectives,
        Reason.BAD_REWRITE: found.bad_rewrites,
    }
    return {
        reason: _some([f"{name}: {what}" if name else what for name, what in sorted(problems.items())])
        for reason, problems in by_reason.items()
        if problems
    }


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
    shown = "; ".join(sorted(items)[:_NAMES_MAX])
    more = len(items) - _NAMES_MAX
    return f"{shown}; and {more} more" if more > 0 else shown
