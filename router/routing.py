"""What a scheduler hands to whoever orders the candidates instead of their cost, and what comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from indexer import PodMatches
from router.pods import Pod, PodSnapshot
from router.request import RouteRequest


class Routing(msgspec.Struct, frozen=True):
    """What a configured pipeline decided beyond the order.

    Attributes:
        destinations: Addresses for the gateway to try, in order; never empty.
        scores: Weighted sums by address, of all that passed the filters.
        excluded: Those that did not pass, and why.
        request_headers: To set on the request.
        response_headers: To set on the response.
        prefill: Address of the pod that prefills, where the destination only decodes; else None.
        reason: One clause for a person.
    """

    destinations: tuple[str, ...]
    scores: Mapping[str, float]
    excluded: Mapping[str, str]
    request_headers: Mapping[str, str]
    response_headers: Mapping[str, str]
    prefill: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class Situation:
    """One request and what is known of its candidates, side by side.

    Attributes:
        candidates: As of the line-up.
        pods: As they are now.
        matches: One for each prompt; empty when the cache's view is not used.
        prompt_blocks: Full blocks of all prompts.
        prices: cost.PRICE [candidates].
        credits: cost.CREDIT [candidates].
        known: board.POD [candidates].
    """

    request: RouteRequest
    priority: int
    prompt_tokens: int
    prompt_blocks: int
    candidates: Sequence[Pod]
    addresses: Sequence[str]
    pods: PodSnapshot
    matches: Sequence[PodMatches]
    prices: NDArray[Any]
    credits: NDArray[Any]
    known: NDArray[Any]
    now_s: float


class Ranker(Protocol):
    """Orders candidates; called by one request at a time."""

    def state(self) -> Mapping[str, Any]:
        """What is remembered, for people; may be asked on any thread."""

    def rank(self, situation: Situation) -> tuple[NDArray[np.int64], Routing]:
        """Places of the candidates, best first, and what else was decided.

        Raises:
            RequestError: Nobody may take the request.
        """
