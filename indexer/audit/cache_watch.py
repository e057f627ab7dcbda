"""Detection of engines that cache less than their users expect, from successive metrics pages. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from indexer.audit.engine_counters import CachingFacts
from indexer.views.tier_proof import TIER_NOT_PROVEN

# Least prompts, and tokens of them, from which a verdict is drawn.
_PROMPTS, _TOKENS = 32, 4096


class FaultKind(StrEnum):
    """Why an engine's cache cannot be used, or not be seen, as its users expect."""

    CACHING_OFF = "caching_off"
    BLOCKS_TOO_LARGE = "blocks_too_large"
    NOTHING_STORED = "nothing_stored"
    TIER_NOT_PROVEN = TIER_NOT_PROVEN
    EVENTS_OFF = "events_off"


@dataclass(frozen=True, slots=True)
class EngineFault:
    """Fault of an engine; `text` says what is wrong, and which setting mends it."""

    kind: FaultKind
    text: str


CACHING_OFF = EngineFault(
    FaultKind.CACHING_OFF,
    "prefix caching is off, the engine caches nothing: start vLLM with --enable-prefix-caching; where vLLM "
    "switched it off by itself, its log says why",
)
EVENTS_OFF = EngineFault(
    FaultKind.EVENTS_OFF,
    "KV events are off, so its cache cannot be seen: start vLLM with --kv-events-config "
    '\'{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557"}\'',
)


class CacheWatch:
    """Watch of one pod's engines; `fault` is the latest verdict."""

    def __init__(self) -> None:
        self.fault: EngineFault | None = None
        self._first = CachingFacts()  # start of the present window

    def observe(self, now: CachingFacts, *, stored: bool) -> None:
        """Judge a reading.

        Args:
            stored: Whether the pod's events have stored a block, or the events may be incomplete.
        """
        if now.is_on is False:
            self.fault = CACHING_OFF
            return
        if self.fault is CACHING_OFF:
            self.fault = None
        if now.prompts is None or now.prompts_tokens is None:
            return
        first = self._first
        if first.prompts is None or first.prompts_tokens is None or now.prompts < first.prompts:
            self._first = now
            return
        prompts, tokens = now.prompts - first.prompts, now.prompts_tokens - first.prompts_tokens
        if prompts >= _PROMPTS:
            self._first = now
            nothing_stored = tokens >= _TOKENS and not stored
            self.fault = _judge(int(tokens / prompts), now.block_tokens or 0, nothing_stored)


def tier_fault(tiers: Sequence[str], ttl_s: float) -> EngineFault | None:
    """Return the fault of an engine with these unproven tiers, whose blocks expire after `ttl_s`."""
    if not tiers:
        return None
    return EngineFault(
        FaultKind.TIER_NOT_PROVEN,
        f"no event ever removed a block from {', '.join(tiers)}, so they expire after {ttl_s:g} s: use "
        "a connector that publishes removals (vLLM: OffloadingConnector), or set --unproven-tier-ttl",
    )


def _judge(mean_tokens: int, block_tokens: int, has_no_blocks: bool) -> EngineFault | None:
    if mean_tokens < block_tokens:
        return EngineFault(
            FaultKind.BLOCKS_TOO_LARGE,
            f"blocks of {block_tokens} tokens, prompts of {mean_tokens} on average; only whole blocks are "
            "cached: lower --block-size, or expect no hits",
        )
    if has_no_blocks:
        return EngineFault(
            FaultKind.NOTHING_STORED,
            f"it published no block for prompts of {mean_tokens} tokens on average: prefix caching is off "
            "(SGLang: --disable-radix-cache), or its events go elsewhere (--kv-events-config)",
        )
    return None
