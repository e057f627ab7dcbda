"""Which pods may take a request: a snapshot and a request in, the pods (or the error to answer) out.

Pure: knows readiness, served models and the gateway's subset; knows nothing of caches or load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.errors import NoEndpointError, RequestError
from router.pods import Pod, PodSnapshot
from router.request import RouteRequest


@dataclass(frozen=True, slots=True)
class Candidates:
    """The pods that may take a request.

    Attributes:
        pods: Never empty.
        base_model: The base of the asked model, which roots its block keys; None while no candidate has told
            it.
        lora_name: The asked model's name if it is an adapter.
        context_tokens: The longest context that any of the pods has; None while one has not told.
        excluded: The other pods, and why each may not.
    """

    pods: Sequence[Pod]
    base_model: str | None
    lora_name: str | None
    context_tokens: int | None
    excluded: dict[str, str]


def candidates_for(request: RouteRequest, pods: PodSnapshot) -> Candidates:
    """Filters the pods. Where none is ready, those that only fell silent are better than nothing.

    Raises:
        NoEndpointError: No pod is ready, or none of those the gateway allows.
        RequestError: 404, when every ready pod has told its models and none serves this one.
    """
    allowed, excluded = [], {}
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
        if _allowed(pod, request.candidates):
            allowed.append(pod)
        else:
            excluded[pod.address] = "not allowed by the gateway"
    if not ready:
        raise NoEndpointError("no model server is ready")
    if not serving:
        raise RequestError(404, f"The model `{request.model}` does not exist.", "model")
    if not allowed:
        raise NoEndpointError("none of the endpoints that the gateway allows is a ready model server")
    base, lora = _base_and_adapter(request.model, allowed)
    return Candidates(allowed, base, lora, _context_tokens(allowed), excluded)


def _serves(pod: Pod, model: str | None) -> bool:
    return model is None or pod.models is None or pod.models.serves(model)


def _allowed(pod: Pod, allowed: frozenset[str] | None) -> bool:
    # The reference compares addresses without their ports; a port that is given is meant, so it counts here.
    return allowed is None or pod.address in allowed or pod.address.rpartition(":")[0] in allowed


def _base_and_adapter(model: str | None, pods: Sequence[Pod]) -> tuple[str | None, str | None]:
    for pod in pods:
        if model is not None and pod.models is not None:
            return pod.models.base, model if model in pod.models.adapters else None
    return model, None


def _context_tokens(pods: Sequence[Pod]) -> int | None:
    told = [pod.models.max_model_len for pod in pods if pod.models and pod.models.max_model_len]
    return max(told) if len(told) == len(pods) else None
