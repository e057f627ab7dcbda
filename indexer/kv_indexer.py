"""Facade of the indexer for the router and the stand-alone service: streams to follow in, matches out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from indexer.audit.cache_watch import CACHING_OFF, CacheWatch, EngineFault, FaultKind, engine_fault
from indexer.audit.engine_counters import CachingFacts, EngineReading, Finding, check_counters
from indexer.audit.mismatch_watch import SentPrompt
from indexer.config import PODS_MAX, IndexerConfig, PodStream, engine_name
from indexer.errors import ConfigError
from indexer.index.contract import (
    NOT_FOLLOWED,
    Cause,
    IndexStats,
    Limit,
    PodMatches,
    Prefix,
    PromptCauses,
    StreamState,
    explain_prefix,
    split_prompt,
)
from indexer.keys import Keys, Tokens
from indexer.peers.service import PeerClient, PeerIdentity, PeerService
from indexer.streams.ingest import Ingest
from indexer.streams.subscriber import Subscriber
from indexer.views.applier import warm_kernels

if TYPE_CHECKING:
    from indexer.streams.relay import Relay

# Minimum time between two counts of a view's blocks, each of which scans the whole index.
_COUNT_EVERY_S = 10.0
# Other salts and adapters under which a prompt is looked up, and models of which they are remembered.
_SCOPES_MAX, _MODELS_MAX = 8, 256
_NO_LIMIT = Limit()


def _ignore(*_: object) -> None:
    """Default callback, which does nothing."""


class KvIndexer:
    """Index of the followed pods' cached blocks, which matches prompts against them. Thread-safe.

    Args:
        registry: Registry of its metrics; at most one indexer per registry.
        on_stored: Called with (pod, keys, now_s) after the blocks of a batch were added. Like `on_link` it
            runs on the subscriber's thread and must not block.
        on_link: Called with (pod, up) when the connection to the pod's publisher was made or lost. A killed
            engine on the same host is reported within milliseconds.
        clock: Monotonic clock, in seconds; every `now_s` is a time of this clock.
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
        self._index, self._hasher, self._metrics = ingest.index, ingest.hasher, ingest.records.metrics
        self._speculation, self._mismatches = ingest.speculation, ingest.mismatches
        self._hybrid = ingest.hybrid
        self.engine_registry = ingest.engine_registry
        identity = PeerIdentity(self._hasher.fingerprint(), self._index.tiers.names)
        peers = PeerClient(config, identity, self._metrics) if config.peers else None
        self._relay = _relay(config, identity, registry)
        self._subscriber = Subscriber(ingest, peers, self._relay.reader if self._relay is not None else None)
        self.block_tokens, self.bound_endpoint = config.block_tokens, self._subscriber.bound_endpoint
        self.exports = PeerService(
            identity, self._subscriber.export, self._metrics, total_s=config.snapshot_total_s
        )
        self._bootstrap_s, self._unproven_ttl_s = config.bootstrap_s, config.unproven_tier_ttl_s
        self._followed_s: Mapping[str, float] = {}  # start time by pod; replaced as a whole
        self._readings: Mapping[str, EngineReading] = {}
        self._cache_watches: dict[str, CacheWatch] = {}
        self._uncached: frozenset[str] = frozenset()  # pods whose prefix caching is off
        self._counted_s = -math.inf
        # By model: root keys of the salts and adapters of the latest prompts, the latest first.
        self._roots: dict[str, tuple[int, ...]] = {}

    def start(self) -> None:
        self._subscriber.start()
        if self._relay is not None:
            self._relay.start(self._subscriber, self.engine_registry)

    def close(self) -> None:
        """End all subscriptions; idempotent. `match` keeps working on the indexed blocks."""
        if self._relay is not None:
            self._relay.close()
        self._subscriber.close()

    def follow(self, streams: Iterable[PodStream]) -> None:
        """Replace the set of streams: subscribe to new ones, drop the blocks of removed ones.

        Raises:
            ConfigError: There are more than 4096 engines, or a stream needs `events_bind`, which is not set.
        """
        wanted = tuple(streams)
        self._subscriber.follow(wanted)
        before, now_s = self._followed_s, self._clock()
        self._followed_s = {stream.pod: before.get(stream.pod, now_s) for stream in wanted}

    def pending(self) -> frozenset[str]:
        """Return followed pods whose view was never built, until `bootstrap_s` after they were followed."""
        registry, now_s = self.engine_registry, self._clock()
        states, unsettled = registry.states, registry.unsettled()
        return frozenset(
            pod
            for pod, followed_s in self._followed_s.items()
            if (pod in unsettled or pod not in states) and now_s - followed_s < self._bootstrap_s
        )

    def ready(self) -> bool:
        return not self.pending()

    def invalidate(
        self, pod: str, reason: str, *, emptied: bool = False, seen_s: float | None = None
    ) -> None:
        """Clear the view of a pod that another source than its events reports as wrong.

        The view is then rebuilt from a snapshot or a replay. With `emptied` it is not: the engine's cache is
        known to be empty although the engine has not published that, and the pod is STALE until it does.

        Args:
            seen_s: Time at which the cache was seen to be empty; a view with later events is kept. None: now.
        """
        self._subscriber.invalidate(pod, reason, emptied=emptied, seen_s=seen_s)

    def block_keys(
        self,
        model: str,
        token_ids: Tokens,
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        extras: Sequence[bytes] = (),
        dry: bool = False,
    ) -> Keys:
        """Return the keys of the prompt's full blocks, in order.

        Args:
            model: Name of the base model, as in `PodStream.model`.
            token_ids: Prompt as the engine tokenizes it; fastest as a uint32 array.
            extras: Other data that each full block depends on, see `keys.extras_of_prompt`; empty for text.
            dry: Whether the prompt is not sent to a pod, so that its salt and adapter are not remembered.

        Raises:
            TokenError: A token id is outside of 0..2**32-1 or not an integer.
        """
        # Engines treat an empty name or salt as missing.
        root = self._hasher.root(model, lora_name or None, cache_salt or None)
        recent = self._roots.get(model, ())
        if recent[:1] != (root,) and not dry:
            if len(self._roots) >= _MODELS_MAX:
                self._roots.clear()
            self._roots[model] = (root, *[other for other in recent if other != root][:_SCOPES_MAX])
        return self._hasher.chain(root, token_ids, extras)

    def match(
        self,
        keys: Keys,
        pods: Collection[str],
        *,
        prompt_tokens: int | None = None,
        tokens: Tokens | None = None,
        pending_tokens: Mapping[str, int] | None = None,
        dry: bool = False,
    ) -> PodMatches:
        """Return, for each of `pods`, the length of the longest cached prefix of `keys` in blocks.

        A match is rounded down to whole blocks of the pod's engine, if their size is known.

        Args:
            prompt_tokens: Length of the prompt; used where engines serve less, see `HybridMatcher.refine`.
            tokens: The prompt's token ids, for engines that compare the token behind a hit.
            pending_tokens: Uncached tokens in flight by engine, where the request can be sent to one rank of
                a pod; see `EngineRegistry.of_pods`.
            dry: Whether the metrics of lookups leave this one out.
        """
        started_s = time.perf_counter()
        self._speculation.expire(self._clock())
        registry = self.engine_registry
        table = self._index.match(keys, registry.holders(pods), self._servable(prompt_tokens))
        if self._hybrid.pods:
            table = self._hybrid.refine(keys, table, prompt_tokens, tokens)
        found = registry.of_pods(table, pods, pending_tokens, self._hasher.block_tokens)
        if not dry:
            self._metrics.looked_up(found.longest, time.perf_counter() - started_s)
        found.states, found.followed = registry.states, self._followed_s
        return found

    def _servable(self, prompt_tokens: int | None) -> int | None:
        # An engine computes at least the last token.
        return None if prompt_tokens is None else max(0, prompt_tokens - 1) // self._hasher.block_tokens

    def causes(self, model: str, match: PodMatches, pod: str, keys: Keys, tokens: Tokens) -> PromptCauses:
        """Return why the tokens of a prompt are served from the cache of `pod` or computed there."""
        block_tokens, limit = self._hasher.block_tokens, _NO_LIMIT
        if match.held is not match.cached_blocks:
            limit = self._limit(engine_name(pod, match.ranks.get(pod, 0)))
        parts = split_prompt(match, pod, len(tokens), block_tokens, limit)
        if Cause.NEVER_CACHED in parts and len(self._roots.get(model, ())) > 1:
            blocks = self._in_other_scope(model, keys, tokens)
            parts = split_prompt(match, pod, len(tokens), block_tokens, limit, blocks)
        if Cause.EVICTED not in parts:
            return PromptCauses(parts)
        return PromptCauses(parts, max(0.0, self._clock() - match.behind[2]))

    def _limit(self, holder: str) -> Limit:
        return self._hybrid.limit(holder, drops=self._ingest.drops(holder))

    def _in_other_scope(self, model: str, keys: Keys, tokens: Tokens) -> int:
        """Return how many blocks of a prompt are held under another of the latest salts or adapters."""
        block_tokens = self._hasher.block_tokens
        for root in self._roots.get(model, ()):
            first = self._hasher.chain(root, tokens[:block_tokens])
            if first[0] != keys[0] and self._index.match(first, ()).behind[0]:
                return self._index.match(self._hasher.chain(root, tokens), ()).behind[0]
        return 0

    def explain(
        self,
        keys: Keys,
        pods: Collection[str],
        *,
        prompt_tokens: int | None = None,
        tokens: Tokens | None = None,
    ) -> list[Prefix]:
        holders = self.engine_registry.holders(pods)
        return [self._explained(holder, keys, prompt_tokens, tokens) for holder in holders]

    def _explained(self, holder: str, keys: Keys, prompt_tokens: int | None, tokens: Tokens | None) -> Prefix:
        engine, block_tokens = self.engine_registry.engines.get(holder), self._hasher.block_tokens
        table = self._index.match(keys, (holder,), self._servable(prompt_tokens))
        table = self._hybrid.refine(keys, table, prompt_tokens, tokens)
        length = prompt_tokens or len(keys) * block_tokens + 1
        missing = table.held.item(0)
        lost_s = self._index.lost_s(keys.item(missing)) if missing < len(keys) else None
        held = self._index.held(keys, holder)
        stride = table.strides.item(0) if len(table.strides) else 1
        explained = explain_prefix(
            held,
            self._index.tiers,
            stride=stride,
            causes=split_prompt(table, holder, length, block_tokens, self._limit(holder)),
            evicted_s_ago=None if lost_s is None else max(0.0, self._clock() - lost_s),
        )
        return Prefix(
            holder,
            *(NOT_FOLLOWED if engine is None else (engine.state, engine.reason)),
            table.cached_blocks.item(0),
            explained,
            self._ingest.drafter(holder),
            *self._ingest.proven(holder, keys, held, stride),
            faults=() if engine is None else tuple(fault.text for fault in self.faults(engine.stream.pod)),
        )

    def observe(self, pod: str, reading: EngineReading) -> Finding | None:
        """Compare a reading of an engine's metrics with its view; clear the view if it must be wrong.

        Called by one thread; of pods with several ranks only `caching` and `has_drafter` are known.
        """
        for holder in self.engine_registry.members(pod):
            self._ingest.set_drafter(holder, reading.has_drafter)
            self._ingest.set_capacity(holder, reading.capacity_blocks)
        self._watch_cache(pod, reading.caching)
        before = self._readings.get(pod)
        finding = check_counters(before, reading, self._held_blocks(pod, reading))
        hits_moved = before is None or (reading.hit_tokens or 0) > (before.hit_tokens or 0)
        if finding is not None or hits_moved:
            kept = {other: reading for other, reading in self._readings.items() if other in self._followed_s}
            self._readings = {**kept, pod: reading}
        if finding is not None:
            if not (before is not None and before.asleep and reading.asleep):
                self._metrics.findings.labels(finding).inc()
            self.invalidate(pod, finding, emptied=finding.emptied, seen_s=reading.asked_s)
        return finding

    def faults(self, pod: str) -> tuple[EngineFault, ...]:
        """Return why the pod's cache cannot be used, or not be seen, as its users expect; empty if it can."""
        watch = self._cache_watches.get(pod)
        faults = () if watch is None or watch.fault is None else (watch.fault,)
        tiers = sorted({tier for state in self._ingest.states(pod) for tier in state.tier_proof.unproven})
        if not tiers:
            return faults
        values = {"tiers": ", ".join(tiers), "ttl_s": self._unproven_ttl_s}
        return *faults, engine_fault(FaultKind.TIER_NOT_PROVEN, **values)

    def _watch_cache(self, pod: str, facts: CachingFacts) -> None:
        if len(self._cache_watches) > PODS_MAX:
            # Some are of removed pods; those of the others begin anew.
            self._cache_watches, self._uncached = {}, frozenset()
        states = self._ingest.states(pod)
        for state in states:
            state.tier_proof.reports_evictions |= facts.reports_evictions
        stored = any(state.view.runs.block_tokens is not None for state in states)
        watch = self._cache_watches.setdefault(pod, CacheWatch())
        watch.observe(facts, stored=stored or not self.engine_registry.has_exact_streams(pod))
        if (watch.fault is CACHING_OFF) != (pod in self._uncached):
            self._uncached ^= {pod}

    def _held_blocks(self, pod: str, reading: EngineReading) -> int | None:
        """Return a lower bound of the view's blocks in device memory; None: unknown, or within capacity."""
        now_s = self._clock()
        if reading.capacity_blocks is None or now_s - self._counted_s < _COUNT_EVERY_S:
            return None
        if self._ingest.held_blocks(pod, on_device=False) <= reading.capacity_blocks:
            return None
        self._counted_s = now_s
        return self._ingest.held_blocks(pod, on_device=True)

    def speculate(
        self, request_id: Hashable, pod: str, keys: Keys, now_s: float, prompt: SentPrompt | None = None
    ) -> None:
        """Add speculative entries for `keys`, which the pod will soon hold because a request was sent there.

        For prefill and decode on different pods, call it once per pod. A second call for the same request and
        pod replaces the entries; see `Speculation`.

        Args:
            request_id: Id that is unique among the requests in flight.
            prompt: Prompt to compare with the pod's events, see `MismatchWatch`; None: no comparison.
        """
        if pod in self._uncached:
            return
        if prompt is None or not self.engine_registry.has_exact_streams(pod):
            self._speculation.assume(request_id, pod, keys, now_s)
            return
        # Blocks that the pod holds need no entries; in a long conversation these are nearly all. With several
        # ranks another rank may hold them than the one that receives the request.
        held_blocks = prompt.held_blocks if self.engine_registry.has_one_rank(pod) else 0
        self._speculation.assume(request_id, pod, keys[held_blocks:], now_s)
        start, block_tokens = prompt.cached_blocks, self._hasher.block_tokens
        if start:
            parent = int(keys[start - 1])
        else:
            parent = self._hasher.root(prompt.model, prompt.lora_name or None, prompt.cache_salt or None)
        first = prompt.token_ids[start * block_tokens : (start + 1) * block_tokens]
        self._mismatches.expect(
            request_id, pod, prompt.model, parent, keys[start:], first, start_tokens=start * block_tokens
        )

    def settle(self, request_id: Hashable, now_s: float, *, grace_s: float = 0.05) -> None:
        """Let a request's speculative entries expire after `grace_s`: first token, failure or end."""
        self._speculation.settle(request_id, now_s, grace_s)
        self._mismatches.settle(request_id, now_s)

    def cancel_expectation(self, request_id: Hashable) -> None:
        """Stop comparing a request with its pod's events, because it failed or was sent elsewhere."""
        self._mismatches.drop(request_id)

    def check_mismatches(self) -> None:
        """Report pods whose blocks never match ours, in metrics and log; call it every few seconds."""
        now_s = self._clock()
        found, pods = self._mismatches.judge(now_s), self._mismatches.report()
        self._ingest.records.mismatches(found, pods, now_s)
        for watched in pods:
            self._ingest.reconsider(watched.pod)

    def mismatch_details(self) -> list[str]:
        """Return one line per pod whose tokens differ from ours; shown by /ready."""
        self.check_mismatches()
        return self._mismatches.details()

    def drafter_details(self) -> list[str]:
        """Return one line per engine with a drafter; shown by /ready."""
        found = ((holder, self._ingest.drafter(holder)) for holder in self.engine_registry.engines)
        return [f"pod={holder}: {text}" for holder, text in found if text]

    def tokens_by_tier(self) -> dict[str, dict[str, int]]:
        """Return the tokens that each pod holds in each tier; takes milliseconds per million blocks."""
        blocks, names, tokens = self._index.blocks_by_tier(), self._index.tiers.names, {}
        for pod in self._followed_s:
            held = [blocks[each] for each in self.engine_registry.members(pod) if each in blocks]
            # One row per tier.
            counts = zip(names, map(sum, zip(*held, strict=True)), strict=False)
            tokens[pod] = {name: int(count) * self.block_tokens for name, count in counts if count}
        return tokens

    def stats(self) -> IndexStats:
        return self._index.stats()

    def states(self) -> dict[str, StreamState]:
        """Return the state of each followed pod; RECOVERING until the subscriber has opened its stream."""
        states = self.engine_registry.states
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
