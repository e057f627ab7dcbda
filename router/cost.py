"""What a request would cost on each pod, in seconds: what is known of each in, one priced candidate each out.

    cost = queued_prefill_s + a * own_prefill_s + copy_s + kv_pressure_s

`a` is 1 + the mean number of requests awaiting their first token per pod, so that under load a cached block,
which saves work for all who wait, is worth more than a shorter queue. Pure: knows no requests, clocks or
sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostParameters:
    """Physical constants of the cost; no weights.

    Attributes:
        copy_tokens_per_s: Speed of bringing cached tokens from the host tier back to the device
            (512 tokens in 1.5 ms: 50 GB/s for an 8B model).
        decode_slowdown: By how much of itself a prefill gets slower per request that decodes on the same pod.
        kv_free_share: Use of the KV cache up to which nobody is preempted.
        awaiting_max: Cap on the mean number awaiting their first token, in `a`.
    """

    copy_tokens_per_s: float = 340_000.0
    decode_slowdown: float = 0.008
    kv_free_share: float = 0.9
    awaiting_max: float = 16.0


@dataclass(frozen=True, slots=True)
class PodFacts:
    """What is known of one pod when a request is priced.

    Attributes:
        cached_tokens: Prompt tokens that the pod will serve from its cache, in any tier.
        host_tokens: Those of them that must be copied from the host tier first.
        queued_tokens: Uncached prompt tokens of the requests that await their first token there.
        awaiting: How many requests these are.
        decoding: Requests past their first token.
        prefill_tokens_per_s: The pod's learnt speed.
        kv_used_tokens: Tokens in the KV cache that running requests hold.
        kv_capacity_tokens: Size of the KV cache; None when the pod has not told it.
        view: Whether what is known of the cache is EXACT, RECOVERING or STALE.
    """

    pod: str
    cached_tokens: int
    host_tokens: int
    queued_tokens: int
    awaiting: int
    decoding: int
    prefill_tokens_per_s: float
    kv_used_tokens: float = 0.0
    kv_capacity_tokens: int | None = None
    view: str = "EXACT"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One pod with its price and the price's parts; `own_prefill_s` is not yet multiplied by `a`."""

    pod: str
    cost_s: float
    queued_prefill_s: float
    own_prefill_s: float
    copy_s: float
    kv_pressure_s: float
    cached_tokens: int
    uncached_tokens: int
    host_tokens: int
    awaiting: int
    decoding: int
    view: str


def own_weight(pods: Sequence[PodFacts], parameters: CostParameters) -> float:
    """The factor `a`: every second of own prefill is also waited for by those who will queue behind it."""
    mean = sum(pod.awaiting for pod in pods) / len(pods)
    return 1.0 + min(mean, parameters.awaiting_max)


def price(
    prompt_tokens: int, pods: Sequence[PodFacts], parameters: CostParameters
) -> tuple[list[Candidate], float]:
    """Prices a request of `prompt_tokens` on every pod.

    Returns:
        The candidates in the order of `pods`, and the factor `a` they were priced with.
    """
    weight = own_weight(pods, parameters)
    return [_candidate(prompt_tokens, pod, weight, parameters) for pod in pods], weight


def _candidate(prompt_tokens: int, pod: PodFacts, weight: float, parameters: CostParameters) -> Candidate:
    uncached = prompt_tokens - pod.cached_tokens
    slowdown = (1.0 + parameters.decode_slowdown * pod.decoding) / pod.prefill_tokens_per_s
    queued_s = pod.queued_tokens * slowdown
    own_s = uncached * slowdown
    copy_s = pod.host_tokens / parameters.copy_tokens_per_s
    pressure_s = _kv_pressure_s(uncached, pod, parameters)
    return Candidate(
        pod=pod.pod,
        cost_s=queued_s + weight * own_s + copy_s + pressure_s,
        queued_prefill_s=queued_s,
        own_prefill_s=own_s,
        copy_s=copy_s,
        kv_pressure_s=pressure_s,
        cached_tokens=pod.cached_tokens,
        uncached_tokens=uncached,
        host_tokens=pod.host_tokens,
        awaiting=pod.awaiting,
        decoding=pod.decoding,
        view=pod.view,
    )


def _kv_pressure_s(uncached_tokens: int, pod: PodFacts, parameters: CostParameters) -> float:
    """Seconds of prefill that preemption throws away: what is above the free share must be computed again."""
    if not pod.kv_capacity_tokens:
        return 0.0
    limit = parameters.kv_free_share * pod.kv_capacity_tokens
    excess = pod.kv_used_tokens + uncached_tokens - limit
    return max(0.0, excess) / pod.prefill_tokens_per_s
