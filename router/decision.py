"""What was decided for one request and why, as doors answer it and explain keeps it; values only.

Nothing is put into words or objects before somebody asks. Beside it what a configured pipeline decides from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from numpy.typing import NDArray

from indexer import PodMatches
from indexer.parity import DispatchKey
from router.pods import Pod, PodSnapshot
from router.ranking import Candidate, Ranking, reason_for
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


class Decision(msgspec.Struct, frozen=True):
    """What was decided for one request, and on which grounds.

    Attributes:
        ranked: The candidates, best first; never empty.
        excluded: The other pods, and why each was none.
        prompt_tokens: Estimated from the body's size when `degraded`.
        degraded: Why the cache's view was not used; None when it was.
        partial: Why only the beginning of the prompt was known; None when all of it was.
        decided_s: On the router's monotonic clock.
        priority: Of the request; below 0 it may be shed.
        session_pod: The pod that its session was at; None without a session, or at its first request.
        client_model: As the client named the model, where it was rewritten.
        routing: What a configured pipeline decided; None where the cost policy picked.
        is_comparable: Whether the answer's usage tells what is predicted.
    """

    request_id: str
    kind: str
    model: str | None
    ranked: Ranking
    excluded: Mapping[str, str]
    prompt_tokens: int
    degraded: str | None
    decided_s: float
    priority: int = 0
    session_pod: str | None = None
    client_model: str | None = None
    routing: Routing | None = None
    partial: str | None = None
    is_comparable: bool = True

    @property
    def key(self) -> DispatchKey:
        return DispatchKey(self.request_id, self.decided_s)

    @property
    def is_charged(self) -> bool:
        """Whether it is work for a pod, and so in the ledger: a request without a body is none."""
        return self.prompt_tokens > 0

    @property
    def primary(self) -> Candidate:
        return self.ranked.best

    @property
    def prefill_pod(self) -> str | None:
        """The pod that prefills, where the picked one only decodes; else None."""
        return self.routing.prefill if self.routing is not None else None

    @property
    def best_cached_tokens(self) -> int:
        """The most any candidate would have served from its cache."""
        return self.ranked.most_cached_tokens

    @property
    def reason(self) -> str:
        if self.routing is not None:
            return self.routing.reason
        return reason_for(self.ranked, self.prompt_tokens, self.degraded, self.session_pod)
