"""What was decided for one request and why, as doors answer it and explain keeps it; values only.

Nothing is put into words or objects before somebody asks.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from indexer.dispatched import DispatchKey
from router.pick import reason_for
from router.ranking import Candidate, Ranking
from router.routing import Routing


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
        """What tells it apart from others of its id."""
        return DispatchKey(self.request_id, self.decided_s)

    @property
    def is_charged(self) -> bool:
        """Whether it is work for a pod, and so in the ledger: a request without a body is none."""
        return self.prompt_tokens > 0

    @property
    def primary(self) -> Candidate:
        """The picked pod."""
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
        """One sentence for a person."""
        if self.routing is not None:
            return self.routing.reason
        return reason_for(self.ranked, self.prompt_tokens, self.degraded, self.session_pod)
