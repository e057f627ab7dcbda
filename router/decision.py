"""What was decided for one request and why, as doors answer it and explain keeps it; values only.

Nothing is put into words or objects before somebody asks. Beside it what a configured pipeline decides from.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from indexer.dispatched import DispatchKey
from router.ranking import Candidate, Ranking, reason_for


class Routing(msgspec.Struct, frozen=True):
    """What a configured pipeline decided beyond the order."""

    destinations: tuple[str, ...]  # addresses for the gateway to try, in order; never empty
    scores: Mapping[str, float]  # weighted sums by address, of all that passed the filters
    excluded: Mapping[str, str]  # those that did not pass, and why
    request_headers: Mapping[str, str]  # to set on the request
    response_headers: Mapping[str, str]  # to set on the response
    prefill: str | None  # address of the pod that prefills, where the destination only decodes; else None
    reason: str  # one clause for a person


class Decision(msgspec.Struct, frozen=True):
    """What was decided for one request, and on which grounds."""

    request_id: str
    kind: str
    model: str | None
    ranked: Ranking  # the candidates, best first; never empty
    excluded: Mapping[str, str]  # the other pods, and why each was none
    prompt_tokens: int  # estimated from the body's size when `degraded`
    degraded: str | None  # why the cache's view was not used; None when it was
    decided_s: float  # on the router's monotonic clock
    priority: int = 0  # of the request; below 0 it may be shed
    session_pod: str | None = None  # where its session was; None: it has none, or it is the first request
    client_model: str | None = None  # as the client named the model, where it was rewritten
    routing: Routing | None = None  # what a configured pipeline decided; None where the cost policy picked
    partial: str | None = None  # why only the beginning of the prompt was known; None when all of it was
    is_comparable: bool = True  # whether the answer's usage tells what is predicted

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
    def reason(self) -> str:
        if self.routing is not None:
            return self.routing.reason
        return reason_for(self.ranked, self.prompt_tokens, self.degraded, self.session_pod)
