"""Prices in, the order in which to try the candidates out, and why in one sentence.

Pure: the random source is passed in; knows nothing of how a price came about.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from compiled.jit import kernel_with_arrays
from router.ranking import Candidate, Ranking


def reason_for(
    ranked: Ranking, prompt_tokens: int, degraded: str | None, session_pod: str | None = None
) -> str:
    """One sentence for a person: why the first of `ranked`."""
    best = ranked.best
    if degraded is not None:
        return f"by load alone ({degraded}): {_queue(best)}"
    if len(ranked) == 1:
        return f"the only candidate: {_cached(best, prompt_tokens)}"
    longest, (holders, first) = ranked.most_cached_tokens, ranked.holders_of_most
    if best.cached_tokens < longest:
        holder = ranked[first]
        return (
            f"{_queue(best)}, though {holder.pod} holds {longest} of {prompt_tokens} tokens: "
            f"it would answer later ({holder.cost_s:.3f} s against {best.cost_s:.3f} s)"
        )
    if holders == 1:
        return f"longest cached prefix: {_cached(best, prompt_tokens)}"
    if best.cost_s == ranked.cost_s(1):
        chosen = "its session's pod" if best.pod == session_pod else "by chance"
        return f"{chosen} among equals: {_cached(best, prompt_tokens)}"
    return f"least work: {_cached(best, prompt_tokens)}, {_queue(best)}"


# numpy's own sorts and draws give up the GIL, and all picks wait behind the one that waits to have it back.
@kernel_with_arrays
def least_cost_first(costs_s: NDArray[np.float64], seed: int) -> NDArray[np.int64]:
    """Orders candidates by cost; equals in random order, so that concurrent routers do not herd.

    Fisher and Yates' shuffle by Marsaglia's xorshift64 (13, 7, 17), then a stable sort.

    Args:
        seed: Random, 0 to 2**63 - 1.
    """
    order = np.arange(len(costs_s))
    state = np.uint64(seed) | np.uint64(1)
    for last in range(len(order) - 1, 0, -1):
        state ^= state << np.uint64(13)
        state ^= state >> np.uint64(7)
        state ^= state << np.uint64(17)
        chosen = np.int64((state >> np.uint64(11)) % np.uint64(last + 1))
        order[last], order[chosen] = order[chosen], order[last]
    return order[np.argsort(costs_s[order], kind="mergesort")]


def _cached(candidate: Candidate, prompt_tokens: int) -> str:
    return f"{candidate.cached_tokens} of {prompt_tokens} tokens cached"


def _queue(candidate: Candidate) -> str:
    if not candidate.awaiting:
        return "nobody queues there"
    return f"{candidate.awaiting} queued there ({candidate.queued_prefill_s:.3f} s)"
