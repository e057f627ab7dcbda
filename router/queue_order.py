"""When an engine that orders its prefills will get to a new request, and whom that delays.

Such an engine ("aged") computes, at each step, the requests with the least arrival + 10 x remaining own
seconds, as many tokens as its step takes: short prompts overtake long ones, and whoever waits long enough is
overtaken no more. Nobody overtakes within a step, and all whose prompts end in one step have their first
tokens at its end. Pure; the rule is the engine's own, so router and engine must agree on it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiled.jit import kernel_with_arrays

AGE_FACTOR = 10.0

# One pod's queue, as a new request finds it.
_QUEUE = np.dtype(
    [
        ("begun_tokens", "f8"),  # of those that came before the step that runs began
        ("begun_s", "f8"),  # what is left of them before the new one
        ("ahead", "f8"),  # requests that came later and are before it in the order
        ("ahead_tokens", "f8"),
        ("behind", "f8"),  # requests that it overtakes
        ("behind_tokens", "f8"),
    ]
)


@kernel_with_arrays
def is_ahead(arrived_s: float, own_s: float, new_arrived_s: float, new_own_s: float) -> bool:
    """Whether a waiting request of `own_s` seconds is computed before a new one."""
    return arrived_s + AGE_FACTOR * own_s <= new_arrived_s + AGE_FACTOR * new_own_s


@kernel_with_arrays
def queue_in_order(
    pods: NDArray[Any],
    waiting: NDArray[Any],
    rows: NDArray[np.int64],
    seconds_per_token: NDArray[np.float64],
    own_s: NDArray[np.float64],
    now_s: float,
    elapsed_share: float,
    queued_s: NDArray[np.float64],
    delayed: NDArray[np.float64],
) -> None:
    """Writes when each candidate that orders its prefills gets to a new request, and how many it delays.

    Args:
        pods: board.POD [rows].
        waiting: board.WAITING [slots].
        rows: int64 [candidates], their rows in `pods`.
        seconds_per_token: float64 [candidates].
        own_s: float64 [candidates], the new request's own seconds there.
        now_s: When it arrives.
        elapsed_share: How much of a running step's elapsed time is believed to be done.
        queued_s: float64 [candidates], written: seconds until its first token, without its own.
        delayed: float64 [candidates], written: requests that have their first tokens later by its seconds.
    """
    places = np.full(len(pods), -1)
    any_orders = False
    for place in range(len(rows)):
        if pods[rows[place]]["ordered_step_tokens"] > 0.0:
            places[rows[place]] = place
            any_orders = True
    if not any_orders:
        return
    queues = np.zeros(len(rows), _QUEUE)
    for request in waiting:
        row = request["pod"]
        if row >= 0 and places[row] >= 0 and request["arrived_s"] <= pods[row]["head_since_s"]:
            queues[places[row]]["begun_tokens"] += request["tokens"]
    for request in waiting:
        row = request["pod"]
        if row >= 0 and places[row] >= 0:
            place = places[row]
            rate = seconds_per_token[place]
            _sort_in(pods[row], request, rate, own_s[place], now_s, elapsed_share, queues[place])
    for place in range(len(rows)):
        step_tokens = pods[rows[place]]["ordered_step_tokens"]
        if step_tokens > 0.0:
            queue, rate = queues[place], seconds_per_token[place]
            queued_s[place] = queue["begun_s"] + rate * _tokens_until(queue, own_s[place] / rate, step_tokens)
            delayed[place] = queue["behind"]
            if queue["ahead_tokens"] > 0.0:
                # Those who share its step end with it; more than a step of them does not.
                delayed[place] += queue["ahead"] * min(1.0, step_tokens / queue["ahead_tokens"])


@kernel_with_arrays
def _sort_in(
    pod: Any,
    request: Any,
    seconds_per_token: float,
    own_s: float,
    now_s: float,
    elapsed_share: float,
    queue: Any,
) -> None:
    """Adds a waiting request to what is before or behind the new one."""
    tokens, arrived_s, since_s = request["tokens"], request["arrived_s"], pod["head_since_s"]
    theirs_s = tokens * seconds_per_token
    if arrived_s > since_s:
        if is_ahead(arrived_s, theirs_s, now_s, own_s):
            queue["ahead"] += 1.0
            queue["ahead_tokens"] += tokens
        else:
            queue["behind"] += 1.0
            queue["behind_tokens"] += tokens
        return
    begun_tokens = max(1.0, queue["begun_tokens"])
    step_tokens = min(begun_tokens, pod["ordered_step_tokens"])
    # A step that takes longer than expected must not use up the others' time.
    elapsed_s = max(0.0, now_s - since_s)
    left_s = theirs_s * _left(elapsed_s, begun_tokens * seconds_per_token, elapsed_share)
    if is_ahead(arrived_s, left_s, now_s, own_s):
        queue["begun_s"] += left_s
        return
    in_step = step_tokens / begun_tokens
    queue["begun_s"] += theirs_s * in_step * _left(elapsed_s, step_tokens * seconds_per_token, elapsed_share)
    if in_step < 1.0:
        queue["behind"] += 1.0
        queue["behind_tokens"] += tokens * (1.0 - in_step)


@kernel_with_arrays
def _left(elapsed_s: float, whole_s: float, elapsed_share: float) -> float:
    """The share of what takes `whole_s` that is believed to be left."""
    return 1.0 - elapsed_share * min(1.0, elapsed_s / whole_s)


@kernel_with_arrays
def _tokens_until(queue: Any, own_tokens: float, step_tokens: float) -> float:
    """Others' tokens that are computed, after what is begun, until the step is over that ends the new one."""
    ahead_tokens = queue["ahead_tokens"] + own_tokens
    room_tokens = np.ceil(ahead_tokens / step_tokens) * step_tokens - ahead_tokens
    return float(queue["ahead_tokens"] + min(queue["behind_tokens"], room_tokens))
