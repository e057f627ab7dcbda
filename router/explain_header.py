"""A decision as one short response header, for who debugs from the client's side: a Decision in, text out."""

from __future__ import annotations

from router.decision import Decision

EXPLAIN_HEADER = "x-kvroute-explain"


def explain_value(decision: Decision) -> str:
    """The picked pod with its price, the best of the fleet, and why, as `name=value` pairs in ASCII."""
    best = decision.primary
    pairs = [
        f"pod={best.pod}",
        f"cached={best.cached_tokens}/{decision.prompt_tokens}",
        f"best_cached={decision.best_cached_tokens}",
        f"queued_s={best.queued_prefill_s:.4f}",
        f"own_s={best.own_prefill_s:.4f}",
        f"cost_s={best.cost_s:.4f}",
        f"view={best.view}",
        f"candidates={len(decision.ranked)}",
    ]
    if decision.routing is not None:
        pairs.append(f"score={decision.routing.scores[best.pod]:.4g}")
    if decision.degraded is not None:
        pairs.append(f"degraded={decision.degraded}")
    return "; ".join(pairs)
