"""Cost model: predicted time to first token of a request on each pod, in seconds.

    cost = queued_prefill_s + a * own_prefill_s + copy_s + kv_pressure_s + extra_s

`a` is 1 + the mean number of requests per pod that await their first token. Under load a cache hit therefore
outweighs a shorter queue, because it also shortens the wait of all later requests. Pure functions: no clock,
no I/O.
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

# Time to load a LoRA adapter's weights to the device (100 MB from host memory or disk).
_ADAPTER_LOAD_S = 0.2
# Time until a running adapter has no more requests and frees its slot.
_SLOT_WAIT_S = 2.0

# Cost of a request on one pod, and the load it was computed from.
COST_BREAKDOWN = np.dtype(
    [
        ("cost_s", "f8"),
        ("queued_prefill_s", "f8"),
        ("own_prefill_s", "f8"),  # before multiplication by own_weight
        ("own_weight", "f8"),
        ("copy_s", "f8"),
        ("kv_pressure_s", "f8"),
        ("extra_s", "f8"),
        ("slowdown", "f8"),  # factor by which decoding requests slow the prefill, at least 1
        ("awaiting", "i8"),  # requests from this router that await their first token
        ("decoding", "i8"),  # requests past their first token, from any client
        ("load_age_s", "f8"),  # age of the engine's metrics; inf: never scraped
    ]
)

# Prompt tokens that a pod serves from its cache, and how many of them must be copied from the host tier.
CACHE_HIT = np.dtype([("cached_tokens", "i8"), ("host_tokens", "i8")])


class CostParameters(NamedTuple):
    """Physical constants of the cost model; it has no tunable weights."""

    # Copy rate from the host tier to the device (512 tokens in 1.5 ms: 50 GB/s for an 8B model).
    copy_tokens_per_s: float = 340_000.0
    decode_slowdown: float = DECODE_SLOWDOWN
    elapsed_share: float = 0.5  # share of the running prefill's elapsed time that counts as progress
    # Extra queue time of a pod whose queue should be empty by now, as a share of the delay so far: a prefill
    # that is late is likely to stay late.
    overdue_share: float = 0.5
    overdue_max_s: float = 1.0  # cap on that extra time, as the report of the end may be missing
    kv_free_share: float = 0.9  # share of the KV cache up to which no request is preempted
    awaiting_max: float = 16.0  # cap on the mean number of requests in `a`
    load_age_max_s: float = 5.0  # older engine metrics are ignored

    def record(self) -> NDArray[Any]:
        """Return an array of one record, which is cheaper to pass to a kernel than a tuple."""
        return np.array([tuple(self)], [(name, "f8") for name in self._fields])


class CostInputs(NamedTuple):
    """Values that the cost of a request depends on and that are the same for all pods."""

    prompt_tokens: float
    now_s: float
    fleet_tokens_per_s: float  # prefill rate of pods without a reported or observed rate
    mean_tokens: float  # uncached tokens of an average request; assumed for requests of other clients


@kernel_with_arrays
def cost_breakdowns(
    pods: NDArray[Any],
    rows: NDArray[np.int64],
    hits: NDArray[Any],
    extra_s: NDArray[np.float64],
    request: CostInputs,
    parameters: Any,
) -> NDArray[Any]:
    """Compute the cost of a request on every candidate.

    Args:
        pods: load_table.POD [rows].
        rows: int64 [candidates], their rows in `pods`.
        hits: CACHE_HIT [candidates].
        extra_s: float64 [candidates], seconds to add, such as adapter loading; empty for none.
        parameters: The record of a CostParameters.

    Returns:
        COST_BREAKDOWN [candidates].
    """
    breakdowns = np.zeros(len(rows), COST_BREAKDOWN)
    awaiting = 0.0
    for row in rows:
        awaiting += pods[row]["awaiting"]
    weight = 1.0 + min(awaiting / max(1, len(rows)), parameters["awaiting_max"])
    for at in range(len(rows)):
        pod, cost = pods[rows[at]], breakdowns[at]
        cost["load_age_s"] = request.now_s - pod["scraped_s"]
        is_fresh = cost["load_age_s"] <= parameters["load_age_max_s"]
        cost["awaiting"] = pod["awaiting"]
        cost["decoding"] = pod["decoding"] + (pod["foreign_running"] if is_fresh else 0.0)
        cost["slowdown"] = 1.0 + parameters["decode_slowdown"] * cost["decoding"]
        seconds_per_token = cost["slowdown"] / prefill_tokens_per_s(pod, request.fleet_tokens_per_s)
        uncached_tokens = request.prompt_tokens - hits[at]["cached_tokens"]
        cost["queued_prefill_s"] = _queued_s(pod, is_fresh, seconds_per_token, request, parameters)
        cost["own_prefill_s"] = uncached_tokens * seconds_per_token
        cost["own_weight"] = weight
        cost["copy_s"] = hits[at]["host_tokens"] / parameters["copy_tokens_per_s"]
        excess_tokens = _excess_tokens(pod, is_fresh, request.prompt_tokens, parameters)
        cost["kv_pressure_s"] = excess_tokens * seconds_per_token
        cost["extra_s"] = pod["failure_s"] + (extra_s[at] if len(extra_s) else 0.0)
        weighted_s = weight * cost["own_prefill_s"]
        other_s = cost["copy_s"] + cost["kv_pressure_s"] + cost["extra_s"]
        cost["cost_s"] = cost["queued_prefill_s"] + weighted_s + other_s
    return breakdowns


@kernel_with_arrays
def add_hits(
    cached_blocks: NDArray[np.int32],
    blocks_by_tier: NDArray[np.int32],
    strides: NDArray[np.int32],
    device_tiers: NDArray[np.int64],
    match_rows: NDArray[np.int64],
    prompt_tokens: int,
    block_tokens: int,
    hits: NDArray[Any],
) -> None:
    """Add the cached tokens of one prompt to each candidate's hit.

    Args:
        cached_blocks: int32 [match rows].
        blocks_by_tier: int32 [match rows, tiers].
        strides: int32 [match rows], index blocks per engine block; empty if 1 for all.
        device_tiers: int64 [tiers], numbers of the tiers whose blocks need no copy.
        match_rows: int64 [candidates], their rows in the match.
        prompt_tokens: Length of the prompt.
        block_tokens: Tokens per index block.
        hits: CACHE_HIT [candidates], updated in place.
    """
    # An engine always computes the last token, and serves only whole blocks of its own size.
    servable = max(0, prompt_tokens - 1) // block_tokens
    for candidate in range(len(match_rows)):
        row = match_rows[candidate]
        served: int = min(int(cached_blocks[row]), servable)
        if len(strides):
            served -= served % strides[row]
        on_device = 0
        for tier in device_tiers:
            on_device += blocks_by_tier[row, tier]
        hits[candidate]["cached_tokens"] += served * block_tokens
        hits[candidate]["host_tokens"] += max(0, served - on_device) * block_tokens


@kernel_with_arrays
def _queued_s(
    pod: Any, is_fresh: bool, seconds_per_token: float, request: CostInputs, parameters: Any
) -> float:
    """Return the seconds until the pod starts a new request; `is_fresh`: engine metrics count."""
    # The progress of a late prefill is capped: it must not count as progress of the requests behind it.
    elapsed_s = request.now_s - pod["head_since_s"]
    running_s = max(0.0, min(elapsed_s, pod["head_tokens"] * seconds_per_token))
    waiting_s = pod["awaiting_tokens"] * seconds_per_token
    queued_s = waiting_s - parameters["elapsed_share"] * running_s
    if pod["awaiting"] > 0.0:
        # The pod had time to compute its whole queue since its last first token, yet requests still wait.
        late_s = max(0.0, elapsed_s - waiting_s)
        queued_s += min(parameters["overdue_share"] * late_s, parameters["overdue_max_s"])
    if is_fresh:
        queued_s += pod["foreign_waiting"] * request.mean_tokens * seconds_per_token
    return float(queued_s)


@kernel_with_arrays
def _excess_tokens(pod: Any, is_fresh: bool, prompt_tokens: float, parameters: Any) -> float:
    """Return the tokens above `kv_free_share` of the KV cache, whose prefill a preemption would discard."""
    # A running request pins its whole prompt. How many cached blocks of it others pin already is unknown;
    # counting them twice makes the pod at most as expensive as one without a cache hit.
    if pod["kv_capacity_tokens"] <= 0.0:
        return 0.0
    used_tokens = pod["held_tokens"]
    if is_fresh:
        used_tokens = max(used_tokens, pod["kv_used_tokens"])
    limit_tokens = parameters["kv_free_share"] * pod["kv_capacity_tokens"]
    return float(max(0.0, used_tokens + prompt_tokens - limit_tokens))


# A kernel, because numpy's sorts and random draws release the GIL: every pick would wait to reacquire it.
@kernel_with_arrays
def least_cost_first(costs_s: NDArray[np.float64], seed: int) -> NDArray[np.int64]:
    """Return candidate indices by ascending cost, int64 [candidates].

    Candidates of equal cost are in random order, so that several routers do not all pick the same pod. The
    order is a Fisher-Yates shuffle driven by Marsaglia's xorshift64 (13, 7, 17), followed by a stable sort.

    Args:
        seed: Random number from 0 to 2**63 - 1.
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


def adapter_delay_s(load: LoraLoad | None, adapter: str, sent: Iterable[str] = ()) -> float:
    """Return the seconds until the pod can compute with a LoRA adapter.

    Pods are ordered as by llm-d's lora-affinity-scorer: running, free slot, waiting, no slot.

    Args:
        load: Adapters as the engine reports them; None if it does not, which costs nothing.
        sent: Adapters of this router's requests in flight, oldest first; `load` may be older than these.
    """
    if load is None:
        return 0.0
    load = _with_sent(load, sent)
    if adapter in load.running:
        return 0.0
    if len(load.running | load.waiting) < load.places:
        return _ADAPTER_LOAD_S
    if adapter in load.waiting:
        # The adapter already waits for a slot; on average half of the wait is over.
        return _SLOT_WAIT_S / 2 + _ADAPTER_LOAD_S
    return _SLOT_WAIT_S + _ADAPTER_LOAD_S


def _with_sent(load: LoraLoad, sent: Iterable[str]) -> LoraLoad:
    """Return the load once the engine has received the sent adapters: each takes a free slot or waits."""
    running, waiting = load.running, load.waiting
    for adapter in sent:
        if adapter in running or adapter in waiting:
            continue
        if len(running | waiting) < load.places:
            running |= {adapter}
        else:
            waiting |= {adapter}
    return LoraLoad(running, waiting, load.places)
