"""CPU of a scheduling cycle, from a request's matches to its decision: 5, 25, 100 and 400 pods.

`python -m benchmarks.schedule [--json] [--quick] [--rounds N]`. Measures cache hits and costs of all
candidates, the ranking, the ledger entry and the decision, in CPU time of this process. Every pod has waiting
and decoding requests and fresh engine metrics. Medians over rounds of many cycles.
"""

from __future__ import annotations

import msgspec
import numpy as np
from msgspec.structs import replace

from benchmarks.report import Options, cpu_s, read_options
from indexer import PodMatches, StreamState
from indexer.pod_entry import PodEntry
from indexer.wire.tiers import Tiers
from router.inflight.ledger import Ledger, LedgerParameters
from router.picking.candidates import CandidateCache
from router.picking.scheduler import Scheduler, TokenizedRequest
from router.pods.engine_load import EngineLoad
from router.pods.pod_set import Pod, PodSet, ServedModels
from router.prompts.request import RequestKind, RouteRequest, known

_PODS = (5, 25, 100, 400)
_PROMPT_TOKENS = 8192
_BLOCK_TOKENS = 16
_CYCLES = 500


class Fleet:
    """Busy pods that have prefixes of one prompt of different lengths cached."""

    def __init__(self, pods: int) -> None:
        self._pods = PodSet()
        self._ledger = Ledger(LedgerParameters(), self._pods.load_table)
        self._scheduler = Scheduler(
            self._pods.load_table, self._ledger, np.random.default_rng(7), block_tokens=_BLOCK_TOKENS
        )
        entries = [_entry(number) for number in range(pods)]
        self._pods.declare(entries)
        for number, entry in enumerate(entries):
            self._pods.put(_pod(entry, number))
        keys = np.arange(_PROMPT_TOKENS // _BLOCK_TOKENS, dtype=np.uint64)
        request = RouteRequest("", RequestKind.CHAT, "m")
        self._candidates = CandidateCache(self._pods).get(request)
        self._matches = [_matches(self._candidates.addresses, len(keys))]
        prompt = np.zeros(_PROMPT_TOKENS, np.uint32)
        self._tokenized = TokenizedRequest(request, known((prompt,)), [keys], None)
        self._number = 0
        self.run(self.requests(4 * pods))
        for number in range(2 * pods):
            self._ledger.first_token(str(number + 1), 1.0)

    def requests(self, count: int) -> list[TokenizedRequest]:
        """Return requests to schedule, each once."""
        first, self._number = self._number + 1, self._number + count
        requests = (
            replace(self._tokenized.request, request_id=str(number)) for number in range(first, first + count)
        )
        return [msgspec.structs.replace(self._tokenized, request=request) for request in requests]

    def run(self, requests: list[TokenizedRequest]) -> None:
        """Schedule requests one after the other."""
        for tokenized in requests:
            self._scheduler.schedule(tokenized, self._candidates, self._pods.current, self._matches, 1.0)

    def end_newest(self, count: int) -> None:
        """End the requests that were scheduled last."""
        for number in range(self._number, self._number - count, -1):
            self._ledger.end(str(number), 1.0)


def main() -> int:
    """Measure and print all figures."""
    options = read_options(__doc__, rounds=9)
    options.report.machine()
    measure(options)
    return 0


def measure(options: Options) -> None:
    """Print the figures of every number of pods."""
    cycles = options.of_size(_CYCLES, 20)
    for pods in _PODS:
        options.report.figure(
            f"schedule_{pods}_pods_us",
            "us",
            _measure(Fleet(pods), options.rounds, cycles),
            pods=pods,
            prompt_tokens=_PROMPT_TOKENS,
            waiting_per_pod=2,
            decoding_per_pod=2,
        )


def _measure(fleet: Fleet, rounds: int, cycles: int) -> list[float]:
    """Return the CPU microseconds of a cycle, one value per round, after a warm-up round."""
    return [_round_us(fleet, cycles) for _ in range(rounds + 1)][1:]


def _round_us(fleet: Fleet, cycles: int) -> float:
    requests = fleet.requests(cycles)
    took_s = cpu_s(lambda: fleet.run(requests))
    fleet.end_newest(cycles)
    return took_s / cycles * 1e6


def _entry(number: int) -> PodEntry:
    return PodEntry(f"pod-{number}", "bench", f"10.0.{number // 250}.{number % 250}", 8000)


def _pod(entry: PodEntry, number: int) -> Pod:
    load = EngineLoad(
        waiting=1,
        running=2,
        kv_usage=number % 10 / 10,
        kv_capacity_tokens=200_000,
        scraped_s=0.5,
    )
    models = ServedModels("m", frozenset({"m"}), max_model_len=131_072)
    return Pod(entry.pod, entry.name, entry, ready=True, why="", probed=True, models=models, load=load)


def _matches(pods: tuple[str, ...], blocks: int) -> PodMatches:
    tiers = Tiers()
    held = np.array([blocks * place // len(pods) for place in range(len(pods))], np.int32)
    by_tier = np.zeros((len(pods), len(tiers.names)), np.int32)
    by_tier[:, 0] = held
    rows, states = {pod: row for row, pod in enumerate(pods)}, dict.fromkeys(pods, StreamState.EXACT)
    return PodMatches(rows, tiers, held, by_tier, states=states, followed=frozenset(pods))


if __name__ == "__main__":
    raise SystemExit(main())
