"""Time to first token behind several routers with and without shared ledgers, and the CPU of sharing.

`python -m benchmarks.replicas [--json] [--quick] [--rounds N]`. First in virtual time, as in `queues`: the
same requests and pods behind one router and behind several, with each request at a random router. `alone`:
routers know each other's requests only through the pods' cache events and, once a second, queue lengths.
`shared`: routers exchange their requests in flight, with a delay of some milliseconds. `ttft_*_ms` is the
mean time to first token and independent of the machine. `share_*_cpu_us` is the CPU per request from dispatch
to end, with 512 uncached tokens: of the ledger without peers, of a sending and of a receiving router.
`share_late_ms` is the time from a dispatch until another router has it, over gRPC.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from random import Random

import numpy as np
from prometheus_client import CollectorRegistry

from benchmarks.queues import Arrival, Policy, Router, arrivals, run
from benchmarks.report import Report, cpu_s, read_options
from indexer import IndexerConfig, KvIndexer
from indexer.peers.service import PeerIdentity
from indexer.pod_entry import PodEntry
from kvroute.stack import HOST
from router.feedback.change_log import ChangeLog, LedgerChanges, LedgerService, decode_changes
from router.feedback.fleet import RemoteLoad
from router.feedback.follower import LedgerFollower
from router.h2 import GrpcServer
from router.inflight.dispatch import Dispatch
from router.inflight.ledger import Ledger, LedgerParameters
from router.inflight.rates import RateSample
from router.pods.pod_set import PodSet

_LOADS = ((4, 0.5), (4, 0.8), (8, 0.9))
_SIZES = ("short", "mixed")
_REQUESTS, _ROUNDS = 700, 5
_ROUTERS = 4
_LATE_MS = (5, 50, 500)
_SCRAPE_EVERY_S = 1.0

_PODS, _BATCH = 16, 10
_PAUSE_S = 0.03
_BLOCKS, _NEW_BLOCKS = 128, 32


class Fleet:
    """Several routers; a request reaches any of them.

    Args:
        routers: Number of routers.
        late_s: Delay of messages between routers; None: they send none.
    """

    def __init__(self, pods: int, seed: int, *, routers: int, late_s: float | None) -> None:
        self._routers = [Router(pods, seed + at) for at in range(routers)]
        self._late_s = late_s
        self._random = Random(seed)
        self._pods = pods
        self._scraped_s = [0.0] * routers
        self._sent: dict[int, tuple[int, Arrival, int]] = {}
        # Messages to each router with their arrival times, the earliest first.
        self._told: list[list[tuple[float, Callable[[Router, float], None]]]] = [[] for _ in range(routers)]

    def pick(self, arrival: Arrival) -> int:
        now_s = arrival.arrived_s
        at = self._random.randrange(len(self._routers))
        self._catch_up(at, now_s)
        if now_s - self._scraped_s[at] >= _SCRAPE_EVERY_S:
            self._scraped_s[at] = now_s
            sent = Counter(pod for _, _, pod in self._sent.values())
            self._routers[at].scraped([sent[pod] for pod in range(self._pods)], now_s)
        pod = self._routers[at].pick(arrival)
        self._sent[arrival.number] = at, arrival, pod
        self._tell(at, now_s, lambda router, then_s: router.send(arrival, pod, then_s))
        return pod

    def first_token(self, number: int, now_s: float) -> None:
        at, arrival, pod = self._sent.pop(number)
        self._routers[at].first_token(number, now_s)
        for router in self._routers:
            # Events reach all routers.
            router.holds(pod, arrival.prompt)
        self._tell(at, now_s, lambda router, then_s: router.first_token(number, then_s))

    def _tell(self, teller: int, now_s: float, news: Callable[[Router, float], None]) -> None:
        if self._late_s is not None:
            for at, told in enumerate(self._told):
                if at != teller:
                    told.append((now_s + self._late_s, news))

    def _catch_up(self, at: int, now_s: float) -> None:
        told = self._told[at]
        while told and told[0][0] <= now_s:
            due_s, news = told.pop(0)
            news(self._routers[at], due_s)


def _policies() -> Iterator[tuple[str, Callable[[int, int], Policy]]]:
    """Policies by name; each is made from the number of pods and a seed."""
    yield "1_router", partial(Fleet, routers=1, late_s=None)
    yield f"{_ROUTERS}_routers_alone", partial(Fleet, routers=_ROUTERS, late_s=None)
    for late_ms in _LATE_MS:
        yield (
            f"{_ROUTERS}_routers_shared_{late_ms}ms_late",
            partial(Fleet, routers=_ROUTERS, late_s=late_ms / 1000),
        )


def _simulate(report: Report, requests: int, rounds: int) -> None:
    for pods, load in _LOADS:
        for size in _SIZES:
            for name, made in _policies():
                ran = [
                    run(arrivals(requests, pods, load, size, seed), pods, made(pods, seed))
                    for seed in range(rounds)
                ]
                p99_ms = statistics.fmean(1000 * sorted(one)[len(one) * 99 // 100] for one in ran)
                setting = {"pods": pods, "load": load, "requests": requests, "p99_ms": round(p99_ms, 1)}
                figure = f"ttft_{size}_{pods}_pods_{load:.0%}_{name}_ms".replace("%", "")
                report.figure(figure, "ms", [1000 * statistics.fmean(one) for one in ran], **setting)


class Costs:
    """Dispatches and ends: kept local, sent to a peer, and received."""

    def __init__(self) -> None:
        self.entries = [PodEntry(f"pod-{at}", "bench", f"10.0.0.{at}", 8000) for at in range(_PODS)]
        pods = PodSet()
        pods.declare(self.entries)
        self._ledger = Ledger(LedgerParameters(), pods.load_table)
        self._change_log = ChangeLog(self._ledger)
        other = PodSet()
        other.declare(self.entries)
        index = KvIndexer(IndexerConfig(hash_seed=7), registry=CollectorRegistry())
        self._work = RemoteLoad(Ledger(LedgerParameters(), other.load_table), index, other)
        self._numbers = count()
        self._keys = np.random.default_rng(7).integers(0, 1 << 63, (64, _BLOCKS)).astype(np.uint64)

    def untold(self, requests: int) -> float:
        """Return CPU microseconds of the ledger for one request without peers."""
        return 1e6 * cpu_s(lambda: self._serve(requests)) / requests

    def shared(self, requests: int) -> tuple[float, float]:
        """Return the same for sending, and for receiving, including encoding and decoding."""
        follower = self._change_log.subscribe()
        messages: list[bytes] = []

        def tell() -> None:
            for _ in range(requests // _BATCH):
                numbers = self._begin(_BATCH)
                self._change_log.flush()
                messages.append(follower.get(0))
                self._end(numbers)
                self._change_log.flush()
                messages.append(follower.get(0))

        def take() -> None:
            for message in messages:
                self._work.apply("peer", decode_changes(message), 0.0)

        try:
            return 1e6 * cpu_s(tell) / requests, 1e6 * cpu_s(take) / requests
        finally:
            self._change_log.unsubscribe(follower)

    def _serve(self, requests: int) -> None:
        for _ in range(requests // _BATCH):
            self._end(self._begin(_BATCH))

    def _begin(self, requests: int) -> list[str]:
        names = []
        for _ in range(requests):
            number = next(self._numbers)
            name, pod = f"{number:032x}", self.entries[number % _PODS].pod
            names.append(name)
            dispatch = Dispatch(name, pod, 16 * _NEW_BLOCKS, 0.0, 0.1, None, RateSample.EXACT, 0.0)
            self._ledger.dispatch(dispatch, self._keys[number % 64, _BLOCKS - _NEW_BLOCKS :])
        return names

    def _end(self, names: list[str]) -> None:
        for name in names:
            self._ledger.first_token(name, 0.0)
            self._ledger.end(name, 0.0)


def _late_ms(requests: int) -> list[float]:
    """Return milliseconds until another router has a request, one at a time, over loopback."""
    ledger = Ledger(LedgerParameters())
    change_log = ChangeLog(ledger)
    ours, theirs = (PeerIdentity(fingerprint=7, tiers=("gpu",)) for _ in range(2))
    taken_ms: list[float] = []
    taken = threading.Event()

    def take(_address: str, changes: LedgerChanges, now_s: float) -> None:
        if changes.sent:
            taken_ms.append(1000 * (now_s - sent_s))
            taken.set()

    server = GrpcServer(
        *("port", HOST, 0),
        threads=4,
        requests_max=8,
        message_bytes_max=0,
        services=(LedgerService(change_log, ours).add_to,),
        inline={},
    )
    server.start()
    change_log.start()
    peers = (f"{HOST}:{server.port}",)
    config = IndexerConfig(hash_seed=7, peers=peers)
    following = LedgerFollower(config, theirs, take, lambda _address, _now_s: 0)
    following.start()
    while not change_log.follower_count:
        time.sleep(_PAUSE_S)
    for number in range(requests):
        time.sleep(_PAUSE_S)
        taken.clear()
        sent_s = time.monotonic()
        ledger.dispatch(Dispatch(str(number), "10.0.0.1:8000", 1, 0.0, 0.1, None, RateSample.EXACT, sent_s))
        taken.wait()
    following.close()
    change_log.close()
    server.close()
    return taken_ms


def main() -> int:
    """Simulate, measure and print all figures."""
    options = read_options(__doc__, rounds=_ROUNDS)
    report = options.report
    report.machine()
    _simulate(report, options.of_size(_REQUESTS, 30), options.rounds)
    costs, requests = Costs(), options.of_size(5_000, 50)
    untold, told, taken = [], [], []
    for _ in range(options.rounds + 1):
        untold.append(costs.untold(requests))
        tell_us, take_us = costs.shared(requests)
        told.append(tell_us)
        taken.append(take_us)
    report.figure("share_ledger_alone_cpu_us", "us", untold[1:])
    report.figure("share_tell_cpu_us", "us", told[1:], batch=_BATCH, new_blocks=_NEW_BLOCKS)
    report.figure("share_take_cpu_us", "us", taken[1:], batch=_BATCH, new_blocks=_NEW_BLOCKS)
    report.figure("share_late_ms", "ms", _late_ms(options.of_size(300, 10)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
