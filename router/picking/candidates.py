"""Candidate selection: filters pods by readiness, served model, the gateway's subset and a request's state.

Also remembers the pods of earlier requests: the last pod of each session, and the pods that keep stored
responses, conversations and files of the Responses API. Engines keep these in their own memory, so a request
that names one must go to the pod that has it.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from threading import Lock
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from router.errors import NoEndpointError, RequestError
from router.pods.pod_set import Pod, PodSet, pod_life
from router.prompts.request import MODEL_CHARS_MAX, RequestKind, RouteRequest

# Reasons to exclude a pod while another candidate has neither.
ASLEEP, FAILING = "its engine sleeps", "failing: "

# An error is also sent as a gRPC status, of which clients accept a few kilobytes.
_MODEL_CHARS_SHOWN = 200
_ENTRIES_MAX = 256

HELD, GONE, UNKNOWN = "held", "gone", "unknown"
STATE_ID_CHARS_MAX = 256

_PATH_ID = re.compile(r"/((?:resp|conv|file)[-_][^/?]{1,250})(?:[/?]|$)")


@dataclass(slots=True, eq=False)
class CandidateSet:
    """Pods that may serve a request, with their rows in the load table and in index matches."""

    pods: Sequence[Pod]  # never empty
    addresses: tuple[str, ...]  # in the order of `pods`
    base_model: str | None  # base of the requested model, used in block keys; None until a pod reports it
    lora_name: str | None  # the requested model if it is an adapter
    context_tokens: int | None  # longest context of any pod; None until every pod has reported its own
    excluded: dict[str, str]  # reason by address, for all other pods
    rows: NDArray[np.int64]  # int64 [pods], rows in the load table
    address_set: frozenset[str] = field(init=False)  # `addresses`, as index lookups take them
    _rows_by_pod: Mapping[str, int] = field(init=False, default_factory=dict)
    _match_rows: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.address_set = frozenset(self.addresses)
        self._match_rows = np.zeros(0, np.int64)

    def match_rows(self, rows_by_pod: Mapping[str, int]) -> NDArray[np.int64]:
        """Return the row of each pod in the arrays of an index match, int64 [pods]."""
        # The index returns the same mapping object for the same set of pods.
        if rows_by_pod is not self._rows_by_pod:
            rows = (rows_by_pod[address] for address in self.addresses)
            self._match_rows = np.fromiter(rows, np.int64, len(self.addresses))
            self._rows_by_pod = rows_by_pod
        return self._match_rows


def select_candidates(request: RouteRequest, pod_set: PodSet) -> CandidateSet:
    """Return the pods that may serve a request.

    If no pod is ready, pods that only stopped answering probes are candidates. If all candidates sleep,
    sleeping pods are candidates, because an operator may wake them; likewise if all fail.

    Raises:
        NoEndpointError: No pod is ready, or the gateway allows none of those that are.
        RequestError: 404, if every ready pod has reported its models and none serves the requested one.
    """
    allowed, excluded, pods = [], {}, pod_set.of_pool(request.pool)
    ready = serving = False
    none_ready = not any(pod.ready for pod in pods.values())
    for pod in pods.values():
        if not (pod.ready or (none_ready and pod.silent)):
            excluded[pod.address] = f"not ready: {pod.why}"
            continue
        ready = True
        if not _serves(pod, request.model):
            excluded[pod.address] = "does not serve the model"
            continue
        serving = True
        if is_allowed(pod, request.candidates):
            allowed.append(pod)
        else:
            excluded[pod.address] = "not allowed by the gateway, or not the pod of the request's state"
    if not ready:
        raise NoEndpointError("no model server is ready")
    if not serving:
        name = request.model or ""
        shown = name if len(name) <= _MODEL_CHARS_SHOWN else f"{name[:_MODEL_CHARS_SHOWN]}..."
        raise RequestError(404, f"The model `{shown}` does not exist.", "model")
    if not allowed:
        raise no_allowed_endpoint()
    if awake := [pod for pod in allowed if not pod.asleep]:
        excluded |= {pod.address: ASLEEP for pod in allowed if pod.asleep}
        allowed = awake
    if serving_pods := [pod for pod in allowed if not pod.failing]:
        excluded |= {pod.address: FAILING + pod.failing for pod in allowed if pod.failing}
        allowed = serving_pods
    addresses = tuple(pod.address for pod in allowed)
    base, lora = _base_and_adapter(request.model, allowed)
    rows = pod_set.load_table.rows(addresses)
    return CandidateSet(allowed, addresses, base, lora, _context_tokens(allowed), excluded, rows)


def is_allowed(pod: Pod, allowed: frozenset[str] | None) -> bool:
    """Return whether the gateway allows the pod; None allows all pods."""
    # llm-d compares addresses without ports. Here a port counts if the gateway gives one.
    return allowed is None or pod.address in allowed or pod.address.rpartition(":")[0] in allowed


def no_allowed_endpoint() -> NoEndpointError:
    """Return the error for a request whose allowed endpoints include no ready pod."""
    return NoEndpointError("none of the endpoints that the gateway allows is a ready model server")


def _serves(pod: Pod, model: str | None) -> bool:
    if model is None:
        return True
    # A pod that has not reported its models accepts any name of valid length.
    return len(model) <= MODEL_CHARS_MAX if pod.models is None else pod.models.serves(model)


def _base_and_adapter(model: str | None, pods: Sequence[Pod]) -> tuple[str | None, str | None]:
    for pod in pods:
        if model is not None and pod.models is not None:
            return pod.models.base, model if model in pod.models.adapters else None
    return model, None


def _context_tokens(pods: Sequence[Pod]) -> int | None:
    reported = [pod.models.max_model_len for pod in pods if pod.models and pod.models.max_model_len]
    return max(reported) if len(reported) == len(pods) else None


@dataclass(eq=False)
class CandidateCache:
    """Cache of candidate sets by model, allowed endpoints and pool, until the pods change. Thread-safe.

    Most requests ask for the same model, and filtering hundreds of pods takes longer than computing costs.
    """

    pods: PodSet

    def __post_init__(self) -> None:
        self._generation = -1
        self._entries: dict[tuple[str | None, frozenset[str] | None, str], CandidateSet] = {}

    def get(self, request: RouteRequest) -> CandidateSet:
        """Return the candidates of a request, from the cache if possible; see `select_candidates`."""
        # Read the generation before the pods: a change in between makes the new entry outdated, not wrong.
        generation = self.pods.generation
        if generation != self._generation or len(self._entries) >= _ENTRIES_MAX:
            self._entries, self._generation = {}, generation
        entries, key = self._entries, (request.model, request.candidates, request.pool)
        if (candidates := entries.get(key)) is None:
            candidates = entries[key] = select_candidates(request, self.pods)
        return candidates


@dataclass(eq=False)
class StatePods:
    """Bounded LRU table of the pod that keeps each state. Thread-safe."""

    pods: PodSet
    # Called with `HELD`, `GONE` or `UNKNOWN` for each request that names state.
    count: Callable[[str], None] = lambda _outcome: None
    capacity: int = 100_000  # ids; the least recently used one is dropped

    def __post_init__(self) -> None:
        # Address and life of the pod by id; a peer may name a pod that is not discovered here yet.
        self._holders: OrderedDict[str, tuple[str, tuple[str, ...] | None]] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._holders)

    def learn(self, state_id: str, address: str) -> None:
        """Record that a pod keeps a state; ids of unusual length are ignored."""
        if not 0 < len(state_id) <= STATE_ID_CHARS_MAX:
            return
        pod = self.pods.current.get(address)
        with self._lock:
            self._holders[state_id] = address, pod_life(pod.entry) if pod is not None else None
            self._holders.move_to_end(state_id)
            if len(self._holders) > self.capacity:
                self._holders.popitem(last=False)

    def latest(self, count: int) -> list[tuple[str, str]]:
        """Return id and address of the latest states, latest first."""
        with self._lock:
            return [(name, address) for name, (address, _) in islice(reversed(self._holders.items()), count)]

    def bound(self, request: RouteRequest) -> RouteRequest:
        """Return the request with the pod of its state as the only candidate.

        Without known state it is returned unchanged, and the picked engine answers for itself.

        Raises:
            RequestError: 404: the pod is gone; 503: the gateway does not allow the pod.
        """
        outcome, count = None, self.count if not request.dry else lambda _outcome: None
        for param, state_id in _named_states(request):
            outcome = UNKNOWN
            with self._lock:
                if (holder := self._holders.get(state_id)) is None:
                    continue
                if not request.dry:
                    self._holders.move_to_end(state_id)
            pod = self.pods.current.get(holder[0])
            if pod is None or holder[1] not in (None, pod_life(pod.entry)):
                count(GONE)
                text = f"{param}: the server that kept '{state_id}' is gone, and its state with it"
                raise RequestError(404, f"{text}; send the input of all turns again", param)
            if not is_allowed(pod, request.candidates):
                raise no_allowed_endpoint()
            count(HELD)
            return replace(request, candidates=frozenset((pod.address,)))
        if outcome is not None:
            count(outcome)
        return request


def _named_states(request: RouteRequest) -> Iterator[tuple[str, str]]:
    """Yield field and id of each state that a request names."""
    if request.kind is RequestKind.PASSTHROUGH:
        if (found := _PATH_ID.search(request.headers.get(":path", ""))) is not None:
            yield "path", found[1]
        return
    body, named = request.body, list[tuple[str, object]]()
    conversation = body.get("conversation")
    named.append(("previous_response_id", body.get("previous_response_id")))
    named.append(("conversation", conversation.get("id") if isinstance(conversation, dict) else conversation))
    for item in _objects(body.get("input")):
        named += [("input", part.get("file_id")) for part in (item, *_objects(item.get("content")))]
    for param, value in named:
        if isinstance(value, str) and 0 < len(value) <= STATE_ID_CHARS_MAX:
            yield param, value


def _objects(value: object) -> Iterator[dict[str, Any]]:
    return (each for each in value if isinstance(each, dict)) if isinstance(value, list) else iter(())


@dataclass(eq=False)
class SessionPods:
    """LRU table of a session's last pod by base model, for `ttl_s` after its last request. Thread-safe."""

    ttl_s: float = 300.0
    capacity: int = 100_000

    def __post_init__(self) -> None:
        self._pods: OrderedDict[tuple[str | None, str], tuple[str, float]] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._pods)

    def pod_of(self, session: str, now_s: float, model: str | None = None) -> str | None:
        """Return the last pod of a session with this base model; None if unknown or expired."""
        key = (model, session)
        with self._lock:
            pod, seen_s = self._pods.get(key, (None, 0.0))
            if now_s - seen_s > self.ttl_s:
                self._pods.pop(key, None)
                return None
            return pod

    def record(self, session: str, pod: str, now_s: float, model: str | None = None) -> None:
        key = (model, session)
        with self._lock:
            self._pods[key] = (pod, now_s)
            self._pods.move_to_end(key)
            if len(self._pods) > self.capacity:
                self._pods.popitem(last=False)
