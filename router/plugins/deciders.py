"""Deciders: whether a stage of a request is worth being done on another pod."""

from __future__ import annotations

from typing import Protocol

from router.config_fields import Fields
from router.plugins.api import Endpoint, PluginRequest
from router.plugins.cache_scorers import APPROXIMATE


class Decider(Protocol):
    """Decides for one stage."""

    def decide(self, request: PluginRequest, decoder: Endpoint | None, /) -> bool:
        """Whether the stage is done apart.

        Args:
            decoder: Where the request will be decoded; None while that is not picked.
        """


class AlwaysPd:
    """Every prefill."""

    def decide(self, _request: PluginRequest, _decoder: Endpoint | None) -> bool:
        """Yes."""
        return True


class AlwaysMultimodal:
    """The encoding of whatever is not text."""

    def decide(self, request: PluginRequest, _decoder: Endpoint | None) -> bool:
        """Whether there is such a thing."""
        return request.multimodal


class PrefixBasedPd:
    """Prefills that are long where they are decoded.

    Args:
        producer: Whose account of the caches counts.
        uncached_tokens: From so many tokens that the decoding pod does not hold; 0: never.
        prompt_tokens: Shorter prompts never.
    """

    def __init__(self, producer: str = APPROXIMATE, uncached_tokens: int = 0, prompt_tokens: int = 0) -> None:
        self.producer = producer
        self._uncached_tokens = uncached_tokens
        self._prompt_tokens = prompt_tokens

    @classmethod
    def read(cls, parameters: Fields) -> PrefixBasedPd:
        """From a configuration."""
        known = parameters.only("nonCachedTokens", "promptTokens", "prefixMatchInfoProducerName")
        return cls(
            known.text("prefixMatchInfoProducerName", APPROXIMATE),
            known.whole("nonCachedTokens", 0),
            known.whole("promptTokens", 0),
        )

    def decide(self, request: PluginRequest, decoder: Endpoint | None) -> bool:
        """Whether enough of the prompt is not held there."""
        tokens = request.prompt_tokens
        if not self._uncached_tokens or tokens < max(self._prompt_tokens, self._uncached_tokens):
            return False
        hit_tokens = 0
        if decoder is not None:
            match = request.prefix(self.producer, decoder)
            hit_tokens = match.cached_blocks * match.block_tokens
        return tokens - hit_tokens >= self._uncached_tokens
