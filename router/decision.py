"""What was decided for one request and why, as doors answer it and explain keeps it; values only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from router.cost import Candidate


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided for one request, and on which grounds.

    Attributes:
        ranked: The candidates, best first; never empty.
        own_weight: The factor `a` of the cost.
        prompt_tokens: Estimated from the body's size when `degraded`.
        degraded: Why the cache's view was not used; None when it was.
        reason: One sentence for a person.
        decided_s: On the router's monotonic clock.
    """

    request_id: str
    kind: str
    model: str | None
    ranked: Sequence[Candidate]
    excluded: Mapping[str, str]
    own_weight: float
    prompt_tokens: int
    degraded: str | None
    reason: str
    decided_s: float

    @property
    def primary(self) -> Candidate:
        """The picked pod."""
        return self.ranked[0]

    @property
    def best_cached_tokens(self) -> int:
        """The most any candidate would have served from its cache."""
        return max(candidate.cached_tokens for candidate in self.ranked)
