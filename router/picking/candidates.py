"""Candidate selection: filters pods by readiness, served model and the gateway's subset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from router.errors import NoEndpointError, RequestError
from router.pods.pod_set import Pod, PodSet
from router.prompts.request import MODEL_CHARS_MAX, RouteRequest

# Reasons to exclude a pod while another candidate has neither.
ASLEEP, FAILING = "its engine sleeps", "failing: "

# An error is also sent as a gRPC status, of which clients accept a few kilobytes.
_MODEL_CHARS_SHOWN = 200
_ENTRIES_MAX = 256


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
    allowed, excluded, pods = [], {}, pod_set.current
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
        raise RequestError(404, f"The model `{_shortened(request.model)}` does not exist.", "model")
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


def _shortened(model: str | None) -> str:
    name = model or ""
    return name if len(name) <= _MODEL_CHARS_SHOWN else f"{name[:_MODEL_CHARS_SHOWN]}..."


def _base_and_adapter(model: str | None, pods: Sequence[Pod]) -> tuple[str | None, str | None]:
    for pod in pods:
        if model is not None and pod.models is not None:
            return pod.models.base, model if model in pod.models.adapters else None
    return model, None


def _context_tokens(pods: Sequence[Pod]) -> int | None:
    reported = [pod.models.max_model_len for pod in pods if pod.models and pod.models.max_model_len]
    return max(reported) if len(reported) == len(pods) else None


class CandidateCache:
    """Cache of candidate sets by model and allowed endpoints, cleared when the pods change. Thread-safe.

    Most requests ask for the same model, and filtering hundreds of pods takes longer than computing costs.
    """

    def __init__(self, pods: PodSet) -> None:
        self._pods = pods
        self._generation = -1
        self._entries: dict[tuple[str | None, frozenset[str] | None], CandidateSet] = {}

    def get(self, request: RouteRequest) -> CandidateSet:
        """Return the candidates of a request, from the cache if possible.

        Raises:
            NoEndpointError, RequestError: See select_candidates.
        """
        # Read the generation before the pods: a change in between makes the new entry outdated, not wrong.
        generation = self._pods.generation
        if generation != self._generation or len(self._entries) >= _ENTRIES_MAX:
            self._entries, self._generation = {}, generation
        entries, key = self._entries, (request.model, request.candidates)
        if (candidates := entries.get(key)) is None:
            candidates = entries[key] = select_candidates(request, self._pods)
        return candidates
