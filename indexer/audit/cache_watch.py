"""Detection of engines that cache less than their users expect, from successive metrics pages. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from indexer.audit.engine_counters import EngineReading

# Least prompts, and tokens of them, from which a verdict is drawn.
_PROMPTS, _TOKENS = 32, 4096


class FaultKind(StrEnum):
    """Why an engine's cache cannot be used, or not be seen, as its users expect."""

    CACHING_OFF = "caching_off"
    BLOCKS_TOO_LARGE = "blocks_too_large"
    NOTHING_STORED = "nothing_stored"
    TIER_NOT_PROVEN = "tier_not_proven"
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
        self._first = EngineReading()  # start of the present window

    def observe(self, now: EngineReading, *, stored: bool) -> None:
        """Judge a reading.

        Args:
            stored: Whether the pod's events have stored a block, or the events may be incomplete.
        """
        if now.caches is False:
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
            self.fault = _judge(
                int(tokens / prompts), now.block_tokens or 0, tokens >= _TOKENS and not stored
            )


def _judge(mean_tokens: int, block_tokens: int, has_no_blocks: bool) -> EngineFault | None:
    if mean_tokens < block_tokens:
        return EngineFault(
            FaultKind.BLOCKS_TOO_LARGE,
            f"its blocks have {block_tokens} tokens, its prompts {mean_tokens} on average, and it caches "
            "only whole blocks: lower --block-size, or expect no hits",
        )
    if has_no_blocks:
        return EngineFault(
            FaultKind.NOTHING_STORED,
            f"it published no block for prompts of {mean_tokens} tokens on average: prefix caching is off "
            "(SGLang: --disable-radix-cache), or its events go elsewhere (--kv-events-config)",
        )
    return None
