"""What a request would cost on each pod, in seconds: the board's rows and the request's cache in, prices out.

    cost = queued_prefill_s + a * own_prefill_s + copy_s + kv_pressure_s + extra_s

`a` is 1 + the mean number of requests awaiting their first token per pod, so that under load a cached block,
which saves work for all who come, is worth more than a shorter queue. Pure: knows no requests, clocks or
sockets.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.jit import kernel_with_arrays
from router.inflight.rates import DECODE_SLOWDOWN
from router.pods.engine_load import LoraLoad
from router.pods.load_table import prefill_tokens_per_s

# To bring an adapter's weights to the device (100 MB from the host's memory or disk).
_LOAD_S = 0.2
# Until one of the adapters that run has no requests any more and makes room.
_PLACE_S = 2.0

# What a request costs on one pod, and what was known of the pod.
PRICE = np.dtype(
    [
        ("cost_s", "f8"),
        ("queued_prefill_s", "f8"),
        ("own_prefill_s", "f8"),  # not yet multiplied by the weight
        ("own_weight", "f8"),
        ("copy_s", "f8"),
        ("kv_pressure_s", "f8"),
        ("extra_s", "f8"),
        ("slowdown", "f8"),  # by how much decoding requests slow its prefill, 1 or more
        ("awaiting", "i8"),  # requests of ours that await their first token
        ("decoding", "i8"),  # requests past it, others' among them
        ("load_age_s", "f8"),  # inf: never scraped
    ]
)

# Of one pod's cache: prompt tokens it will serve, and those of them that come from beyond the device.
CREDIT = np.dtype([("cached_tokens", "i8"), ("host_tokens", "i8")])


class CostParameters(NamedTuple):
    """Physical constants of the cost; no weights."""

    # Speed of bringing cached tokens from the host tier back to the device (512 tokens in 1.5 ms: 50 GB/s for
    # an 8B model).
    copy_tokens_per_s: float = 340_000.0
    decode_slowdown: float = DECODE_SLOWDOWN
    elapsed_share: float = 0.5  # how much of the running prefill's elapsed time is believed to be done
    # How much longer a pod's queue lasts that should be empty, as a share of how long ago: what takes longer
    # than expected is likely to go on.
    overdue_share: float = 0.5
    overdue_max_s: float = 1.0  # at most so much longer, as its end may only not have been told
    kv_free_share: float = 0.9  # use of the KV cache up to which nobody is preempted
    awaiting_max: float = 16.0  # cap on the number of requests in `a`
    load_age_max_s: float = 5.0  # older accounts of an engine's load are not believed

    def record(self) -> NDArray[Any]:
        """As kernels read them: one record with these fields. An array costs a caller less than a tuple."""
        return np.array([tuple(self)], [(name, "f8") for name in self._fields])


class RequestFacts(NamedTuple):
    """Facts about a request and the whole fleet that pricing needs."""

    prompt_tokens: float
    now_s: float
    fleet_tokens_per_s: float  # prefill speed of a pod of which neither learnt nor told
    mean_tokens: float  # uncached tokens of a usual request: what foreign requests are taken for


@kernel_with_arrays
def price(
    pods: NDArray[Any],
    rows: NDArray[np.int64],
    credits: NDArray[Any],
    extra_s: NDArray[np.float64],
    request: RequestFacts,
    parameters: Any,
) -> NDArray[Any]:
    """Prices a request on every candidate.

    Args:
        pods: board.POD [rows].
        rows: int64 [candidates], their rows in `pods`.
        credits: CREDIT [candidates].
        extra_s: float64 [candidates], seconds to be added: of adapters and sessions. Empty: none.
        parameters: One of CostParameters' records.

    Returns:
        PRICE [candidates].
    """
    prices = np.zeros(len(rows), PRICE)
    awaiting = 0.0
    for row in rows:
        awaiting += pods[row]["awaiting"]
    weight = 1.0 + min(awaiting / max(1, len(rows)), parameters["awaiting_max"])
    for place in range(len(rows)):
        pod, paid = pods[rows[place]], prices[place]
        paid["load_age_s"] = request.now_s - pod["scraped_s"]
        is_fresh = paid["load_age_s"] <= parameters["load_age_max_s"]
        paid["awaiting"] = pod["awaiting"]
        paid["decoding"] = pod["decoding"] + (pod["foreign_running"] if is_fresh else 0.0)
        paid["slowdown"] = 1.0 + parameters["decode_slowdown"] * paid["decoding"]
        seconds_per_token = paid["slowdown"] / prefill_tokens_per_s(pod, request.fleet_tokens_per_s)
        uncached_tokens = request.prompt_tokens - credits[place]["cached_tokens"]
        paid["queued_prefill_s"] = _queued_s(pod, is_fresh, seconds_per_token, request, parameters)
        paid["own_prefill_s"] = uncached_tokens * seconds_per_token
        paid["own_weight"] = weight
        paid["copy_s"] = credits[place]["host_tokens"] / parameters["copy_tokens_per_s"]
        excess_tokens = _tokens_too_many(pod, is_fresh, request.prompt_tokens, parameters)
        paid["kv_pressure_s"] = excess_tokens * seconds_per_token
        paid["extra_s"] = extra_s[place] if len(extra_s) else 0.0
        weighted_s = weight * paid["own_prefill_s"]
        other_s = paid["copy_s"] + paid["kv_pressure_s"] + paid["extra_s"]
        paid["cost_s"] = paid["queued_prefill_s"] + weighted_s + other_s
    return prices


@kernel_with_arrays
def add_credit(
    cached_blocks: NDArray[np.int32],
    blocks_by_tier: NDArray[np.int32],
    strides: NDArray[np.int32],
    device_tiers: NDArray[np.int64],
    places: NDArray[np.int64],
    prompt_tokens: int,
    block_tokens: int,
    credits: NDArray[Any],
) -> None:
    """Adds one prompt's cached tokens to each candidate's credit.

    Args:
        cached_blocks: int32 [match rows].
        blocks_by_tier: int32 [match rows, tiers].
        strides: int32 [match rows], index blocks per engine block; empty: 1 for all.
        device_tiers: int64 [], the tiers from which nothing needs to be copied.
        places: int64 [candidates], their rows in the match.
        prompt_tokens: The prompt's length.
        block_tokens: Tokens of one index block.
        credits: CREDIT [candidates], added to.
    """
    # An engine computes at least the last token, and serves only whole blocks of its own size.
    servable = max(0, prompt_tokens - 1) // block_tokens
    for candidate in range(len(places)):
        row = places[candidate]
        served: int = min(int(cached_blocks[row]), servable)
        if len(strides):
            served -= served % strides[row]
        on_device = 0
        for tier in device_tiers:
            on_device += blocks_by_tier[row, tier]
        credits[candidate]["cached_tokens"] += served * block_tokens
        credits[candidate]["host_tokens"] += max(0, served - on_device) * block_tokens


@kernel_with_arrays
def _queued_s(
    pod: Any, is_fresh: bool, seconds_per_token: float, request: RequestFacts, parameters: Any
) -> float:
    """Seconds until the pod gets to a new request; `is_fresh`: its account of its load counts."""
    # A prefill that takes longer than expected must not use up the others' time.
    elapsed_s = request.now_s - pod["head_since_s"]
    running_s = max(0.0, min(elapsed_s, pod["head_tokens"] * seconds_per_token))
    waiting_s = pod["awaiting_tokens"] * seconds_per_token
    queued_s = waiting_s - parameters["elapsed_share"] * running_s
    if pod["awaiting"] > 0.0:
        # All that waits there could have been computed since somebody had a first token.
        late_s = max(0.0, elapsed_s - waiting_s)
        queued_s += min(parameters["overdue_share"] * late_s, parameters["overdue_max_s"])
    if is_fresh:
        queued_s += pod["foreign_waiting"] * request.mean_tokens * seconds_per_token
    return float(queued_s)


@kernel_with_arrays
def _tokens_too_many(pod: Any, is_fresh: bool, prompt_tokens: float, parameters: Any) -> float:
    """Tokens above the KV cache's free share, whose prefill preemption will throw away.

    A request holds its whole prompt while it runs: cached blocks, which could be evicted before, and what is
    copied from the host, too. Of its blocks that other running requests hold already nobody knows; counted
    again, they make the pod at most as dear as if it had nothing cached.
    """
    if pod["kv_capacity_tokens"] <= 0.0:
        return 0.0
    used_tokens = pod["held_tokens"]
    if is_fresh:
        used_tokens = max(used_tokens, pod["kv_used_tokens"])
    limit_tokens = parameters["kv_free_share"] * pod["kv_capacity_tokens"]
    return float(max(0.0, used_tokens + prompt_tokens - limit_tokens))


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


def adapter_s(load: LoraLoad | None, adapter: str, sent: Iterable[str] = ()) -> float:
    """Seconds until the pod can compute with this adapter, in the order of the reference picker's scores.

    Args:
        load: None for a pod that does not tell: nothing is known, so nothing is charged.
        sent: Adapters that our requests there need, the one that came first first; `load` may be older.
    """
    if load is None:
        return 0.0
    load = _with_sent(load, sent)
    if adapter in load.running:
        return 0.0
    if len(load.running | load.waiting) < load.places:
        return _LOAD_S
    if adapter in load.waiting:
        # It waits for a place already, on average for half of the time.
        return _PLACE_S / 2 + _LOAD_S
    return _PLACE_S + _LOAD_S


def _with_sent(load: LoraLoad, sent: Iterable[str]) -> LoraLoad:
    """The account as it is once the engine has seen these: each takes a place, or waits for one."""
    running, waiting = load.running, load.waiting
    for adapter in sent:
        if adapter in running or adapter in waiting:
            continue
        if len(running | waiting) < load.places:
            running |= {adapter}
        else:
            waiting |= {adapter}
    return LoraLoad(running, waiting, load.places)
