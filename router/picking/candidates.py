"""Which pods may take a request: the pods and a request in, the candidates (or the error to answer) out.

Knows readiness, served models and the gateway's subset; knows nothing of caches or load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from router.errors import NoEndpointError, RequestError
from router.pods.pod_set import Pod, PodSet
from router.prompts.request import MODEL_CHARS_MAX, RouteRequest

ASLEEP = "its engine sleeps"  # why a pod takes no request while another that may take it is awake

# An error goes into a gRPC status, too, of which clients take some kilobytes.
_MODEL_CHARS_SHOWN = 200
_KINDS_MAX = 256


@dataclass(slots=True, eq=False)
class Lineup:
    """The pods that may take a request, with their places in every table."""

    pods: Sequence[Pod]  # never empty
    addresses: tuple[str, ...]  # of the pods, in their order
    base_model: str | None  # the asked model's base, which roots its block keys; None while no pod told it
    lora_name: str | None  # the asked model's name if it is an adapter
    context_tokens: int | None  # the longest context that any of the pods has; None while one has not told
    excluded: dict[str, str]  # the other pods, and why each may not
    rows: NDArray[np.int64]  # int64 [pods], their rows on the board
    asked: frozenset[str] = field(init=False)  # the addresses, as the index is asked for them
    _match_rows: Mapping[str, int] = field(init=False, default_factory=dict)
    _places: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.asked = frozenset(self.addresses)
        self._places = np.zeros(0, np.int64)

    def places(self, match_rows: Mapping[str, int]) -> NDArray[np.int64]:
        """int64 [pods], their rows in a match's arrays."""
        # An index that is asked for the same pods answers in the same order, with the same mapping.
        if match_rows is not self._match_rows:
            places = (match_rows[address] for address in self.addresses)
            self._places = np.fromiter(places, np.int64, len(self.addresses))
            self._match_rows = match_rows
        return self._places


def lineup_for(request: RouteRequest, pod_set: PodSet) -> Lineup:
    """Filters the pods.

    Where none is ready, those that only fell silent are better than nothing; where all sleep, those that
    sleep: somebody may wake them.

    Raises:
        NoEndpointError: No pod is ready, or none of those the gateway allows.
        RequestError: 404, when every ready pod has told its models and none serves this one.
    """
    allowed, excluded, pods = [], {}, pod_set.snapshot()
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
            excluded[pod.address] = "not allowed by the gateway"
    if not ready:
        raise NoEndpointError("no model server is ready")
    if not serving:
        raise RequestError(404, f"The model `{_shown(request.model)}` does not exist.", "model")
    if not allowed:
        raise not_allowed()
    if awake := [pod for pod in allowed if not pod.asleep]:
        excluded |= {pod.address: ASLEEP for pod in allowed if pod.asleep}
        allowed = awake
    addresses = tuple(pod.address for pod in allowed)
    base, lora = _base_and_adapter(request.model, allowed)
    rows = pod_set.board.rows(addresses)
    return Lineup(allowed, addresses, base, lora, _context_tokens(allowed), excluded, rows)


def is_allowed(pod: Pod, allowed: frozenset[str] | None) -> bool:
    """Whether the gateway allows the pod; None: it allows all."""
    # The reference compares addresses without their ports; a port that is given is meant, so it counts here.
    return allowed is None or pod.address in allowed or pod.address.rpartition(":")[0] in allowed


def not_allowed() -> NoEndpointError:
    """The answer where no pod is left of those that the gateway allows."""
    return NoEndpointError("none of the endpoints that the gateway allows is a ready model server")


def _serves(pod: Pod, model: str | None) -> bool:
    if model is None:
        return True
    # A pod that does not tell is not asked for what is no name.
    return len(model) <= MODEL_CHARS_MAX if pod.models is None else pod.models.serves(model)


def _shown(model: str | None) -> str:
    name = model or ""
    return name if len(name) <= _MODEL_CHARS_SHOWN else f"{name[:_MODEL_CHARS_SHOWN]}..."


def _base_and_adapter(model: str | None, pods: Sequence[Pod]) -> tuple[str | None, str | None]:
    for pod in pods:
        if model is not None and pod.models is not None:
            return pod.models.base, model if model in pod.models.adapters else None
    return model, None


def _context_tokens(pods: Sequence[Pod]) -> int | None:
    told = [pod.models.max_model_len for pod in pods if pod.models and pod.models.max_model_len]
    return max(told) if len(told) == len(pods) else None


class Lineups:
    """Line-ups by what requests ask for, kept until something about the pods changes. Thread-safe.

    Filtering hundreds of pods costs more than pricing them, and most requests ask for the same.
    """

    def __init__(self, pods: PodSet) -> None:
        self._pods = pods
        self._generation = -1
        self._known: dict[tuple[str | None, frozenset[str] | None], Lineup] = {}

    def of(self, request: RouteRequest) -> Lineup:
        """Who may take this request.

        Raises:
            NoEndpointError, RequestError: As lineup_for.
        """
        # Read before the pods: whoever changes them after this makes what is kept now outdated.
        generation = self._pods.generation
        if generation != self._generation or len(self._known) >= _KINDS_MAX:
            self._known, self._generation = {}, generation
        known, kind = self._known, (request.model, request.candidates)
        if (lineup := known.get(kind)) is None:
            lineup = known[kind] = lineup_for(request, self._pods)
        return lineup
