"""The indexer as the router and the stand-alone service use it: streams to follow in, matches out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from indexer.audit.engine_counters import EngineReading, Finding, reconcile
from indexer.audit.mismatch_watch import DispatchedPrompt
from indexer.config import IndexerConfig, PodStream
from indexer.errors import ConfigError
from indexer.index.contract import IndexStats, PodMatches, Prefix, StreamState, explain_prefix
from indexer.keys import Keys, Tokens
from indexer.peers.service import PeerClient, PeerDoor, PeerIdentity
from indexer.streams.ingest import Ingest
from indexer.streams.subscriber import Subscriber
from indexer.views.applier import warm_kernels

if TYPE_CHECKING:
    from indexer.streams.relay import Relay

# Between two counts of a view's blocks, which looks at the whole index.
_COUNT_EVERY_S = 10.0


def _ignore(*_: object) -> None:
    """Callback of those who do not care."""


class KvIndexer:
    """Follows the event streams of pods and tells which pod holds how much of a prompt. Thread-safe.

    Args:
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
        on_stored: Callable[[str, Keys, float], None] = _ignore,
        on_link: Callable[[str, bool], None] = _ignore,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        warm_kernels()
        self._ingest = ingest = Ingest(config, registry, on_stored, on_link, clock)
        self._index, self._hasher, self._metrics = ingest.index, ingest.hasher, ingest.metrics
        self._speculation, self._parity = ingest.speculation, ingest.parity
        self._hybrid = ingest.hybrid
        self.roster = ingest.roster
        identity = PeerIdentity(self._hasher.fingerprint(), self._index.tiers.names)
        peers = PeerClient(config, identity, self._metrics) if config.peers else None
        self._relay = _relay(config, identity, registry)
        self._subscriber = Subscriber(ingest, peers, self._relay)
        self.exports = PeerDoor(
            identity, self._subscriber.export, self._metrics, total_s=config.snapshot_total_s
        )
        self._bootstrap_s = config.bootstrap_s
        self._followed_s: Mapping[str, float] = {}  # by pod: since when; replaced as a whole
        self._readings: Mapping[str, EngineReading] = {}
        self._counted_s = -math.inf

    @property
    def block_tokens(self) -> int:
        return self._hasher.block_tokens

    @property
    def bound_endpoint(self) -> str | None:
        return self._subscriber.bound_endpoint

    def start(self) -> None:
        self._subscriber.start()
        if self._relay is not None:
            self._relay.start(self._subscriber, self.roster)

    def close(self) -> None:
        """Ends all subscriptions; idempotent. What is indexed can still be matched."""
        if self._relay is not None:
            self._relay.close()
        self._subscriber.close()

    def follow(self, streams: Iterable[PodStream]) -> None:
        """Declares the full set of streams: new ones are subscribed to, vanished ones' blocks are dropped.

        Raises:
            ConfigError: There are too many.
        """
        wanted = tuple(streams)
        self._subscriber.follow(wanted)
        before, now_s = self._followed_s, self._clock()
        self._followed_s = {stream.pod: before.get(stream.pod, now_s) for stream in wanted}

    def pending(self) -> frozenset[str]:
        """Return followed pods whose view was never built, until `bootstrap_s` after they were followed."""
        states, unsettled, now_s = self.roster.states, self.roster.unsettled(), self._clock()
        return frozenset(
            pod
            for pod, followed_s in self._followed_s.items()
            if (pod in unsettled or pod not in states) and now_s - followed_s < self._bootstrap_s
        )

    def ready(self) -> bool:
        return not self.pending()

    def doubt(self, pod: str, reason: str, *, emptied: bool = False, seen_s: float | None = None) -> None:
        """Something else than its events tells that the view of a pod is wrong.

        The view is cleared. It is then built anew from a snapshot or a replay, unless `emptied` says that the
        engine's cache is known to be empty though it has not said so: then the pod is STALE until it does.

        Args:
            seen_s: When the cache was seen to be empty, on the clock; events that came later know better.
                None: now.
        """
        self._subscriber.doubt(pod, reason, emptied=emptied, seen_s=seen_s)

    def block_keys(
        self,
        model: str,
        token_ids: Tokens,
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        extras: Sequence[bytes] = (),
    ) -> Keys:
        """Keys of the prompt's full blocks, first block first.

        Args:
            model: The base model's name, as in `PodStream.model`.
            token_ids: The prompt, as the engine tokenizes it; fastest as a uint32 array.
            extras: What each full block depends on besides, see `keys.extras_of_prompt`; empty for text.

        Raises:
            TokenError: A token id is out of range or no whole number.
        """
        # An engine treats an empty name or salt as none.
        root = self._hasher.root(model, lora_name or None, cache_salt or None)
        return self._hasher.chain(root, token_ids, extras)

    def match(self, keys: Keys, pods: Collection[str], *, prompt_tokens: int | None = None) -> PodMatches:
        """Tells how far each pod holds the prompt `keys`; every asked pod is in the answer.

        A match ends where a block of the pod's own engine ends, as far as its events told their size.

        Args:
            prompt_tokens: Its length; for pods of hybrid models, see `HybridMatcher.refine`.
        """
        started_s = time.perf_counter()
        self._speculation.expire(self._clock())
        roster = self.roster
        by_rank = self._hybrid.refine(keys, self._index.match(keys, roster.holders(pods)), prompt_tokens)
        found = roster.best_ranks(by_rank, pods)
        self._metrics.looked_up(found.longest, time.perf_counter() - started_s)
        found.states, found.followed = roster.states, self._followed_s
        return found

    def explain(self, keys: Keys, pods: Collection[str], *, prompt_tokens: int | None = None) -> list[Prefix]:
        engines = self.roster.engines
        holders = list(self.roster.holders(pods))
        table = self._hybrid.refine(keys, self._index.match(keys, holders), prompt_tokens)
        prefixes = []
        for holder in holders:
            row, state, reason = table.rows[holder], StreamState.STALE, "not_followed"
            if (engine := engines.get(holder)) is not None:
                state, reason = engine.state, engine.reason
            prefixes.append(
                explain_prefix(
                    holder,
                    self._index.held(keys, holder),
                    self._index.tiers,
                    state=state,
                    reason=reason,
                    usable_blocks=int(table.cached_blocks[row]),
                    stride=int(table.strides[row]) if len(table.strides) else 1,
                )
            )
        return prefixes

    def observe(self, pod: str, reading: EngineReading) -> Finding | None:
        """Compare a reading of an engine's metrics page with its view, which is dropped if it must be wrong.

        Called by one thread, with readings of pods without further ranks.
        """
        before = self._readings.get(pod)
        finding = reconcile(before, reading, self._held_blocks(pod, reading))
        hits_moved = before is None or (reading.hit_tokens or 0) > (before.hit_tokens or 0)
        if finding is not None or hits_moved:
            kept = {other: told for other, told in self._readings.items() if other in self._followed_s}
            self._readings = {**kept, pod: reading}
        if finding is not None:
            if not (before is not None and before.asleep and reading.asleep):
                self._metrics.findings.labels(finding).inc()
            self.doubt(pod, finding, emptied=finding.emptied, seen_s=reading.asked_s)
        return finding

    def _held_blocks(self, pod: str, reading: EngineReading) -> int | None:
        """Blocks that the view holds in device memory, at least; None: not known, or not too many."""
        now_s = self._clock()
        if reading.capacity_blocks is None or now_s - self._counted_s < _COUNT_EVERY_S:
            return None
        if self._ingest.held_blocks(pod, on_device=False) <= reading.capacity_blocks:
            return None
        self._counted_s = now_s
        return self._ingest.held_blocks(pod, on_device=True)

    def speculate(
        self, request_id: Hashable, pod: str, keys: Keys, now_s: float, prompt: DispatchedPrompt | None = None
    ) -> None:
        """Assumes that the pod will soon hold `keys`, because the request was just sent there.

        For prefill and decode on different pods, call it once for each. Called again for the same request and
        pod it renews the assumption, with these blocks; see `Speculation`.

        Args:
            request_id: The request; no other in flight has the same.
            prompt: What the pod's events shall be held against, see `parity`, and what it holds of it; None:
                nothing.
        """
        if prompt is None or not self.roster.lacks_nothing(pod):
            self._speculation.assume(request_id, pod, keys, now_s)
            return
        # What the pod holds already needs no assumption: in a long conversation that is nearly all of it. Of
        # several ranks, another one may hold it than the request will meet.
        held_blocks = prompt.held_blocks if self.roster.has_one_rank(pod) else 0
        self._speculation.assume(request_id, pod, keys[held_blocks:], now_s)
        start, block_tokens = prompt.cached_blocks, self._hasher.block_tokens
        if start:
            parent = int(keys[start - 1])
        else:
            parent = self._hasher.root(prompt.model, prompt.lora_name or None, prompt.cache_salt or None)
        first = prompt.token_ids[start * block_tokens : (start + 1) * block_tokens]
        self._parity.expect(
            request_id, pod, prompt.model, parent, keys[start:], first, start_tokens=start * block_tokens
        )

    def settle(self, request_id: Hashable, now_s: float, *, grace_s: float = 0.05) -> None:
        """First token, failure or end of the request: what is assumed for it ends after `grace_s`."""
        self._speculation.settle(request_id, now_s, grace_s)
        if (mismatch := self._parity.settled(request_id, now_s)) is not None:
            self._ingest.reconsider(mismatch.pod)

    def dropped(self, request_id: Hashable) -> None:
        self._parity.dropped(request_id)

    def check_parity(self) -> None:
        """Shows in metrics and log which pods never store what we compute; to be called every few seconds."""
        self._parity.check(self._clock())
        for parity in self._parity.report():
            self._ingest.reconsider(parity.pod)

    def parity_details(self) -> list[str]:
        """A line for each pod that computes other tokens than we do, or seems to; for /ready."""
        self.check_parity()
        return self._parity.details()

    def stats(self) -> IndexStats:
        return self._index.stats()

    def states(self) -> dict[str, StreamState]:
        """Return the state of each followed pod; before the subscriber has come to one: RECOVERING."""
        states = self.roster.states
        return {pod: states.get(pod, StreamState.RECOVERING) for pod in self._followed_s}


def _relay(config: IndexerConfig, identity: PeerIdentity, registry: CollectorRegistry) -> Relay | None:
    if config.backend != "redis":
        return None
    try:
        from indexer.streams.relay import Relay
    except ModuleNotFoundError as error:
        if error.name != "redis":
            raise
        raise ConfigError(
            "IndexerConfig.backend: 'redis' needs the package redis: pip install 'kvroute[redis]'"
        ) from None
    return Relay(config, identity.fingerprint, identity.tiers, registry)
