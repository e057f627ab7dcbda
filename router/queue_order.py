"""Which of a pod's waiting requests an engine that orders its prefills will compute before a new one.

Such an engine ("aged") computes, at each chunk, the request with the least arrival + 10 x remaining own
seconds: short prompts overtake long ones, and whoever waits long enough is overtaken no more. Pure; the rule
is the engine's own, so router and engine must agree on it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from indexer.jit import kernel_with_arrays

AGE_FACTOR = 10.0


@kernel_with_arrays
def is_ahead(arrived_s: float, own_s: float, new_arrived_s: float, new_own_s: float) -> bool:
    """Whether a waiting request of `own_s` seconds is computed before a new one."""
    return arrived_s + AGE_FACTOR * own_s <= new_arrived_s + AGE_FACTOR * new_own_s


@kernel_with_arrays
def work_ahead(
    waiting: NDArray[Any],
    places: NDArray[np.int64],
    seconds_per_token: NDArray[np.float64],
    own_s: NDArray[np.float64],
    now_s: float,
    elapsed_share: float,
    ahead_s: NDArray[np.float64],
    delayed: NDArray[np.int64],
) -> None:
    """Adds up, for each candidate, the seconds ahead of a new request and how many requests it delays.

    A request that is computed already counts with its remaining seconds, in the order and in the sum.

    Args:
        waiting: board.WAITING [slots].
        places: int64 [board rows], a row's place among the candidates; -1: not to be looked at.
        seconds_per_token: float64 [candidates].
        own_s: float64 [candidates], the new request's own seconds there.
        now_s: When it arrives.
        elapsed_share: How much of a running prefill's elapsed time is believed to be done.
        ahead_s: float64 [candidates], added to.
        delayed: int64 [candidates], added to.
    """
    for slot in range(len(waiting)):
        request = waiting[slot]
        row = request["pod"]
        if row < 0 or places[row] < 0:
            continue
        place = places[row]
        theirs_s = request["tokens"] * seconds_per_token[place]
        # A prefill that takes longer than expected must not use up the others' time.
        theirs_s -= elapsed_share * min(theirs_s, max(0.0, now_s - request["since_s"]))
        if is_ahead(request["arrived_s"], theirs_s, now_s, own_s[place]):
            ahead_s[place] += theirs_s
        else:
            delayed[place] += 1
