"""Detection of engines that cache less than their users expect, from successive metrics pages. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from indexer.audit.engine_counters import CachingFacts
from indexer.wire.tiers import TIER_NOT_PROVEN

# Least prompts, and tokens of them, from which a verdict is drawn.
_PROMPTS, _TOKENS = 32, 4096


class FaultKind(StrEnum):
    """Why an engine's cache cannot be used, or not be seen, as its users expect."""

    CACHING_OFF = "caching_off"
    BLOCKS_TOO_LARGE = "blocks_too_large"
    NOTHING_STORED = "nothing_stored"
    TIER_NOT_PROVEN = TIER_NOT_PROVEN
    EVENTS_OFF = "events_off"


# Text by fault: the misconfiguration, and the setting that mends it.
_TEXTS = {
    FaultKind.CACHING_OFF: "prefix caching is off, the engine caches nothing: start vLLM with "
    "--enable-prefix-caching; where vLLM switched it off by itself, its log says why",
    FaultKind.BLOCKS_TOO_LARGE: "blocks of {block} tokens, prompts of {mean} on average; only whole blocks "
    "are cached: lower --block-size, or expect no hits",
    FaultKind.NOTHING_STORED: "it published no block for prompts of {mean} tokens on average: prefix caching "
    "is off (SGLang: --disable-radix-cache), or its events go elsewhere (--kv-events-config)",
    FaultKind.TIER_NOT_PROVEN: "no event removed a block from {tiers}, so they expire after {ttl_s:g} s: "
    "use a connector that publishes removals (vLLM: OffloadingConnector), or set --unproven-tier-ttl",
    FaultKind.EVENTS_OFF: "KV events are off, its cache cannot be seen: start vLLM with --kv-events-config "
    """'{{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557"}}'""",
}


@dataclass(frozen=True, slots=True)
class EngineFault:
    """Fault of an engine, with a text for operators."""

    kind: FaultKind
    text: str


def engine_fault(kind: FaultKind, **values: object) -> EngineFault:
    """Return a fault with its text, whose fields are `values`."""
    return EngineFault(kind, _TEXTS[kind].format(**values))


CACHING_OFF, EVENTS_OFF = engine_fault(FaultKind.CACHING_OFF), engine_fault(FaultKind.EVENTS_OFF)


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
        prompts, tokens = now.prompts - self._first.prompts, now.prompts_tokens - self._first.prompts_tokens
        if now.is_on is False:
            self.fault = CACHING_OFF
        elif self.fault is CACHING_OFF:
            self.fault = None
        elif not prompts >= 0.0:
            self._first = now
        elif prompts >= _PROMPTS:
            self._first, mean = now, int(tokens / prompts)
            kind = FaultKind.BLOCKS_TOO_LARGE if mean < now.block_tokens else FaultKind.NOTHING_STORED
            if kind is FaultKind.NOTHING_STORED and (stored or tokens < _TOKENS):
                self.fault = None
            elif self.fault is None or self.fault.kind is not kind:
                # A fault that lasts keeps its text, because each new text is an Event of its own.
                self.fault = engine_fault(kind, block=now.block_tokens, mean=mean)
