"""Indexer on real sockets, with its callbacks recorded."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry

from indexer import IndexerConfig, KvIndexer, PodMatch, PodStream, StreamState
from tests.support.indexer.engine_publisher import EnginePublisher, stored, wait_until
from tests.support.paths import ROOT

MODEL = "m"
POD, OTHER = "10.0.0.1:8000", "10.0.0.2:8000"
# Six blocks of 4 tokens.
TOKENS = list(range(24))


def block(number: int, **fields: Any) -> dict[str, object]:
    """Return the event of the n-th block of TOKENS, from 1; its hash is its number."""
    tokens = TOKENS[(number - 1) * 4 : number * 4]
    return stored([number], tokens, parent=number - 1 or None, **fields)


def stream(engine: EnginePublisher, pod: str = POD, model: str = MODEL) -> PodStream:
    """Return the engine's stream under a pod's name."""
    return PodStream(pod, model, engine.events_endpoint, engine.replay_endpoint)


@contextmanager
def started(command: list[str], **streams: int) -> Iterator[subprocess.Popen[str]]:
    """Start a process at the repository's root that ends with its test."""
    with subprocess.Popen(command, cwd=ROOT, text=True, **streams) as process:
        try:
            yield process
        finally:
            process.kill()


class Watched:
    """Running indexer with blocks of 4 tokens.

    Attributes:
        links: Arguments of `on_link`, in order.
        stored: Calls of `on_stored`, as (pod, number of keys).
        on_stored: Function called at each `on_stored`, on the subscriber's thread.
    """

    def __init__(self, **settings: Any) -> None:
        self.registry = CollectorRegistry()
        self.links: list[tuple[str, bool]] = []
        self.stored: list[tuple[str, int]] = []
        self.on_stored: Callable[[str], None] = lambda _: None
        self.indexer = KvIndexer(
            IndexerConfig(**{"block_tokens": 4, "replay_idle_s": 1.0, **settings}),
            registry=self.registry,
            on_stored=self._stored,
            on_link=lambda pod, up: self.links.append((pod, up)),
        )
        self.keys = self.indexer.block_keys(MODEL, TOKENS)
        self.indexer.start()

    def follow(self, *streams: PodStream) -> None:
        """Follow exactly these streams."""
        self.indexer.follow(streams)

    def match(self, pod: str = POD) -> PodMatch:
        """Return the match of TOKENS at the pod."""
        return self.indexer.match(self.keys, [pod], pending_tokens={})[pod]

    def settled(self, cached: int, state: StreamState = StreamState.EXACT, pod: str = POD) -> None:
        """Wait until the pod has so many blocks of TOKENS, in this state."""
        wait_until(
            f"{pod} has {cached} blocks and is {state}",
            lambda: (self.match(pod).cached_blocks, self.match(pod).state) == (cached, state),
        )

    def built(self, source: str) -> None:
        """Wait until one view was built from this source, which is counted after its state is reported."""
        name = "kvroute_indexer_bootstraps_total"
        wait_until(f"a view from {source}", lambda: self.metric(name, source=source) >= 1)
        assert self.metric(name, source=source) == 1

    def metric(self, name: str, **labels: str) -> float:
        """Return the value of a metric; 0 if it has no sample."""
        return self.registry.get_sample_value(name, labels) or 0.0

    def _stored(self, pod: str, keys: Sequence[int], _now_s: float) -> None:
        self.stored.append((pod, len(keys)))
        self.on_stored(pod)
