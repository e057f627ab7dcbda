"""The indexer as the router and the stand-alone service use it: streams to follow in, matches out."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from indexer.config import IndexerConfig, PodStream
from indexer.index import Index, IndexStats
from indexer.ingest import Ingest
from indexer.keys import BlockHasher
from indexer.metrics import IndexerMetrics
from indexer.reference_index import ReferenceIndex
from indexer.speculate import Speculation
from indexer.stream import StreamState
from indexer.subscribe import Subscriber
from indexer.tiers import TierWeights


@dataclass(frozen=True, slots=True)
class PodMatch:
    """How much of a prompt one pod holds, and how far that can be trusted.

    Attributes:
        pod: "ip:port".
        cached_blocks: Length of the longest unbroken prefix in any tier, speculative blocks included. An
            engine computes at least a prompt's last token, so of a whole prompt it may serve one block less.
        blocks_by_tier: How many of these are best held in which tier; speculative ones count as "gpu".
        weighted_blocks: Sum of the best tiers' weights over these blocks.
        state: State of the pod's event stream; STALE for a pod that is not followed.
    """

    pod: str
    cached_blocks: int
    blocks_by_tier: Mapping[str, int]
    weighted_blocks: float
    state: StreamState


def _ignore(*_: object) -> None:
    """Callback of those who do not care."""


class KvIndexer:
    """Follows the event streams of pods and tells which pod holds how much of a prompt. Thread-safe.

    Args:
        config: Settings.
        registry: Where its metrics are registered; at most one indexer for each.
        on_stored: Called with (pod, keys, now_s) after a batch's blocks were added. Like `on_link` it runs
            on the subscriber's thread and must not block.
        on_link: Called with (pod, up) when the connection to the pod's publisher was made or lost. A killed
            engine on the same host shows here within milliseconds.
        clock: A monotonic clock, in seconds; every `now_s` is a time of this clock.
    """

    def __init__(
        self,
        config: IndexerConfig,
        *,
        registry: CollectorRegistry,
        on_stored: Callable[[str, Sequence[int], float], None] = _ignore,
        on_link: Callable[[str, bool], None] = _ignore,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        seed = secrets.randbits(64) if config.hash_seed is None else config.hash_seed
        self._hasher = BlockHasher(config.block_tokens, seed)
        self._index: Index = ReferenceIndex(config.capacity_blocks, TierWeights(config.tier_weights))
        self._speculation = Speculation(
            ttl_s=config.speculative_ttl_s,
            max_s=config.speculative_max_s,
            max_entries=config.speculative_entries,
        )
        self._metrics = IndexerMetrics(
            registry, stats=self._index.stats, speculative=self._speculative_entries
        )
        self._ingest = Ingest(
            config,
            index=self._index,
            hasher=self._hasher,
            speculation=self._speculation,
            metrics=self._metrics,
            on_stored=on_stored,
            on_link=on_link,
            clock=clock,
        )
        self._subscriber = Subscriber(config, self._ingest, clock=clock)
        self._followed: frozenset[str] = frozenset()

    @property
    def block_tokens(self) -> int:
        """Tokens of one block."""
        return self._hasher.block_tokens

    def start(self) -> None:
        """Starts the subscriber's thread."""
        self._subscriber.start()

    def close(self) -> None:
        """Ends all subscriptions; idempotent. What is indexed can still be matched."""
        self._subscriber.close()

    def follow(self, streams: Iterable[PodStream]) -> None:
        """Declares the full set of streams: new ones are subscribed to, vanished ones' blocks are dropped.

        Raises:
            ConfigError: There are too many.
        """
        wanted = tuple(streams)
        self._subscriber.follow(wanted)
        self._followed = frozenset(stream.pod for stream in wanted)

    def block_keys(
        self,
        model: str,
        token_ids: Sequence[int],
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
    ) -> list[int]:
        """Keys of the prompt's full blocks, first block first.

        Args:
            model: The base model's name, as in `PodStream.model`.
            token_ids: The prompt, as the engine tokenizes it.
            lora_name: The adapter's name; None for the base model.
            cache_salt: The request's cache salt.

        Raises:
            TokenError: A token id is out of range or no whole number.
        """
        # An engine treats an empty name or salt as none.
        root = self._hasher.root(model, lora_name or None, cache_salt or None)
        return self._hasher.chain(root, token_ids)

    def match(self, keys: Sequence[int], pods: Collection[str]) -> dict[str, PodMatch]:
        """Tells how far each pod holds the prompt `keys`; every asked pod is in the answer."""
        started_s = time.perf_counter()
        wanted = frozenset(pods)
        assumed = self._speculation.assumed(keys, wanted, self._clock())
        found = self._index.match(keys, wanted, assumed)
        longest = max((match.blocks for match in found.values()), default=0)
        self._metrics.lookups.inc()
        self._metrics.lookup_hits.inc(longest)
        self._metrics.max_pod_hits.inc(longest)
        self._metrics.lookup_s.observe(time.perf_counter() - started_s)
        return {
            pod: PodMatch(
                pod,
                match.blocks,
                match.blocks_by_tier,
                match.weighted_blocks,
                self._state(pod),
            )
            for pod, match in found.items()
        }

    def speculate(self, request_id: str, pod: str, keys: Sequence[int], now_s: float) -> None:
        """Assumes that the pod will soon hold `keys`, because the request was just sent there.

        For prefill and decode on different pods, call it once for each. Called again for the same request and
        pod it renews the assumption; see `Speculation`.
        """
        self._speculation.assume(request_id, pod, keys, now_s)

    def settle(self, request_id: str, now_s: float, *, grace_s: float = 0.05) -> None:
        """First token, failure or end of the request: what is assumed for it ends after `grace_s`."""
        self._speculation.settle(request_id, now_s, grace_s)

    def stats(self) -> IndexStats:
        """Tells the size of the index."""
        return self._index.stats()

    def states(self) -> dict[str, StreamState]:
        """State of every followed pod's stream."""
        return {pod: self._state(pod) for pod in self._followed}

    def _speculative_entries(self) -> int:
        self._speculation.expire(self._clock())
        return len(self._speculation)

    def _state(self, pod: str) -> StreamState:
        # Before the subscriber has come to a new pod, it is on its way to a view.
        unknown = StreamState.RECOVERING if pod in self._followed else StreamState.STALE
        return self._ingest.states.get(pod, unknown)
