"""Time to first token in virtual time, by routing policy.

`python -m benchmarks.queues [--json] [--quick] [--rounds N]`. The pods are the engine's own schedulers
in its default order, whose steps take a time by their tokens instead of being computed; the router's load
table and cost model decide. Requests arrive at random times and begin with one of 20 prompts, new ones per
round. `ttft_*_ms` is the mean time to first token: `fifo` with the router's cost of a queue, beside
`least_requests` and `round_robin`, on the same requests and pods. Nothing depends on the machine.
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from benchmarks.report import read_options
from model_server.engine.scheduler import Scheduler
from model_server.kv_cache.block_pool import BlockPool
from model_server.kv_cache.host_tier import HostTier, OffloadingManager
from model_server.kv_cache.manager import KVCacheManager
from model_server.kv_cache.request import Request, ScheduledRequest
from model_server.kv_events.events import KVEventBuilder
from model_server.requests import EngineCoreRequest, SamplingParams
from model_server.shapes.shape import single_group
from model_server.worker.block_copies import CpuCopies
from router.picking.cost import CACHE_HIT, CostInputs, CostParameters, cost_breakdowns
from router.pods.engine_load import EngineLoad
from router.pods.load_table import PodLoadTable

_BLOCK_TOKENS = 16
_POOL_BLOCKS = 65_536
_STEP_TOKENS = 2048
_PROMPTS, _SHARED_TOKENS, _TOKENS_MAX = 20, 512, 30_000
_TOKENS_PER_S, _STEP_S = 15_000.0, 0.003
# Distributions of uncached tokens by name: mean and standard deviation of the logarithm.
_SIZES = {"short": (5.5, 1.0), "mixed": (7.0, 1.2)}
# Number of pods, and their load if nothing was cached.
_LOADS = ((4, 0.5), (4, 0.8), (8, 0.9))
_REQUESTS = 700
_ROUNDS = 5
_PARAMETERS = CostParameters().record()[0]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: its arrival time and its prefix."""

    number: int
    arrived_s: float
    prompt: int
    tokens: int


class Pod:
    """A scheduler in virtual time."""

    def __init__(self, pool_blocks: int = _POOL_BLOCKS) -> None:
        event_builder = KVEventBuilder(single_group(1), _BLOCK_TOKENS)
        pool = BlockPool(pool_blocks, event_builder)
        copies = CpuCopies([torch.zeros(1, pool_blocks, 1)], 0)
        offload = OffloadingManager(pool, HostTier(0, event_builder, pool.add_event), copies)
        manager = KVCacheManager(
            pool, offload, single_group(1), block_tokens=_BLOCK_TOKENS, chunk_tokens=_STEP_TOKENS
        )
        self._scheduler = Scheduler(
            manager, max_num_seqs=256, max_num_batched_tokens=_STEP_TOKENS, policy="aged"
        )
        self._step: list[ScheduledRequest] = []

    def add(self, arrival: Arrival) -> None:
        """Queue a request."""
        shared = range(arrival.prompt * _SHARED_TOKENS, (arrival.prompt + 1) * _SHARED_TOKENS)
        own = [10**6 + arrival.number] * (arrival.tokens - _SHARED_TOKENS)
        core_request = EngineCoreRequest(str(arrival.number), (*shared, *own), SamplingParams(max_tokens=1))
        request = Request(core_request, 0, arrived_s=arrival.arrived_s, arrival_index=arrival.number)
        self._scheduler.add_request(request)

    def begin_step(self) -> float | None:
        """Return the duration of the next step in seconds, or None if one runs or nothing is queued."""
        if self._step:
            return None
        self._step = self._scheduler.schedule(1 / _TOKENS_PER_S)
        tokens = sum(chunk.num_tokens for chunk in self._step)
        return _STEP_S + tokens / _TOKENS_PER_S if tokens else None

    def end_step(self) -> list[int]:
        """Return the requests that got their first tokens."""
        done = []
        for chunk in self._step:
            chunk.request.num_computed_tokens = chunk.stop
            if chunk.samples:
                done.append(int(chunk.request.request_id))
                self._scheduler.remove_request(chunk.request)
        self._step = []
        return done


class Policy(Protocol):
    """Routing policy."""

    def pick(self, arrival: Arrival) -> int:
        """Return the pod for a request, and record the request there."""

    def first_token(self, number: int, now_s: float) -> None:
        """Record that a request is prefilled."""


class Router:
    """Cost policy of the router, with dispatched prompts as the view of the caches."""

    def __init__(self, pods: int, seed: int) -> None:
        self._names = [str(number) for number in range(pods)]
        self._load_table = PodLoadTable()
        self._load_table.declare(self._names)
        self.scraped([0] * pods, 0.0)
        self._rows = self._load_table.rows(self._names)
        self._hits = np.zeros(pods, CACHE_HIT)
        self._sent: set[tuple[int, int]] = set()
        # Pod and load table ticket by request.
        self._sent_to: dict[int, tuple[str, int]] = {}
        self._random = random.Random(seed)

    def scraped(self, requests: Sequence[int], now_s: float) -> None:
        """Report each pod's number of requests, of which it computes one."""
        for name, number in zip(self._names, requests, strict=True):
            running = min(1, number)
            load = EngineLoad(number - running, running, 0.0, None, now_s, _TOKENS_PER_S)
            self._load_table.scraped(name, load)

    def pick(self, arrival: Arrival) -> int:
        pods = range(len(self._names))
        cached = [_SHARED_TOKENS if (pod, arrival.prompt) in self._sent else 0 for pod in pods]
        self._hits["cached_tokens"] = cached
        load_table, now_s = self._load_table, arrival.arrived_s
        inputs = CostInputs(
            float(arrival.tokens), now_s, load_table.fleet_tokens_per_s, load_table.mean_tokens
        )
        breakdowns = cost_breakdowns(
            load_table.pods, self._rows, self._hits, np.zeros(0), inputs, _PARAMETERS
        )
        least = breakdowns["cost_s"].min()
        pod = self._random.choice([pod for pod in pods if breakdowns["cost_s"][pod] == least])
        self.send(arrival, pod, now_s)
        return pod

    def send(self, arrival: Arrival, pod: int, now_s: float) -> None:
        """Record that a request was sent to a pod."""
        cached = _SHARED_TOKENS if (pod, arrival.prompt) in self._sent else 0
        self.holds(pod, arrival.prompt)
        name = self._names[pod]
        self._sent_to[arrival.number] = name, self._load_table.begin(name, arrival.tokens - cached, now_s)

    def holds(self, pod: int, prompt: int) -> None:
        """Record that the pod holds, or will soon hold, a request's prefix."""
        self._sent.add((pod, prompt))

    def first_token(self, number: int, now_s: float) -> None:
        self._load_table.end_prefill(*self._sent_to.pop(number), now_s)


class LeastRequests:
    """Least requests: the first pod with the fewest requests awaiting a first token."""

    def __init__(self, pods: int, _seed: int) -> None:
        self._waiting = [0] * pods
        self._pods: dict[int, int] = {}

    def pick(self, arrival: Arrival) -> int:
        pod = self._waiting.index(min(self._waiting))
        self._waiting[pod] += 1
        self._pods[arrival.number] = pod
        return pod

    def first_token(self, number: int, _now_s: float) -> None:
        self._waiting[self._pods.pop(number)] -= 1


class RoundRobin:
    """Round-robin."""

    def __init__(self, pods: int, _seed: int) -> None:
        self._count = pods

    def pick(self, arrival: Arrival) -> int:
        return arrival.number % self._count

    def first_token(self, _number: int, _now_s: float) -> None:
        """Do nothing; this policy ignores load."""


# Policies by name; each is built from the number of pods and a seed.
_POLICIES: dict[str, Callable[[int, int], Policy]] = {
    "fifo": Router,
    "least_requests": LeastRequests,
    "round_robin": RoundRobin,
}


def run(arrivals: Sequence[Arrival], pods: int, policy: Policy) -> list[float]:
    """Return seconds until the first token of each request."""
    # The pool is sized by the number of requests, because building a large one is slow.
    blocks = sum(arrival.tokens // _BLOCK_TOKENS + 1 for arrival in arrivals)
    engines = [Pod(min(_POOL_BLOCKS, blocks)) for _ in range(pods)]
    ttft_s = [0.0] * len(arrivals)
    # (time, pod whose step ends or -1, request that arrives)
    events = [(arrival.arrived_s, -1, arrival.number) for arrival in arrivals]
    while events:
        now_s, pod, number = heapq.heappop(events)
        if pod < 0:
            pod = policy.pick(arrivals[number])
            engines[pod].add(arrivals[number])
        else:
            for done in engines[pod].end_step():
                ttft_s[done] = now_s - arrivals[done].arrived_s
                policy.first_token(done, now_s)
        step_s = engines[pod].begin_step()
        if step_s is not None:
            heapq.heappush(events, (now_s + step_s, pod, 0))
    return ttft_s


def arrivals(count: int, pods: int, load: float, size: str, seed: int) -> list[Arrival]:
    """Return requests at random times and of random lengths."""
    chance = random.Random(seed)
    mean, spread = _SIZES[size]
    per_s = load * pods * _TOKENS_PER_S / math.exp(mean + spread**2 / 2)
    found, now_s = [], 0.0
    for number in range(count):
        now_s += chance.expovariate(per_s)
        own_tokens = int(min(_TOKENS_MAX, max(16, chance.lognormvariate(mean, spread))))
        found.append(Arrival(number, now_s, chance.randrange(_PROMPTS), _SHARED_TOKENS + own_tokens))
    return found


def main() -> int:
    """Simulate and print all figures."""
    options = read_options(__doc__, rounds=_ROUNDS)
    options.report.machine()
    requests = options.of_size(_REQUESTS, 30)
    for pods, load in _LOADS:
        for size in _SIZES:
            for policy, made in _POLICIES.items():
                rounds = [
                    run(arrivals(requests, pods, load, size, seed), pods, made(pods, seed))
                    for seed in range(options.rounds)
                ]
                means_ms = [1000 * statistics.fmean(one) for one in rounds]
                p99_ms = statistics.fmean(1000 * sorted(one)[len(one) * 99 // 100] for one in rounds)
                name = f"ttft_{size}_{pods}_pods_{load:.0%}_{policy}_ms".replace("%", "")
                setting = {"pods": pods, "load": load, "requests": requests, "p99_ms": round(p99_ms, 1)}
                options.report.figure(name, "ms", means_ms, **setting)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
