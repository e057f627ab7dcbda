"""Deciders: whether a stage of a request is worth being done on another pod."""

from __future__ import annotations

from typing import Protocol

from msgspec import field

from router.config_fields import Settings, Text, Whole
from router.plugins.api import Endpoint, PluginRequest
from router.plugins.cache_scorers import APPROXIMATE, PRODUCER_KEY


class Decider(Protocol):
    """Decides for one stage."""

    def decide(self, request: PluginRequest, decoder: Endpoint | None, /) -> bool:
        """Whether the stage is done apart.

        Args:
            decoder: Where the request will be decoded; None while that is not picked.
        """


class AlwaysPd(Settings):
    """Every prefill."""

    def decide(self, _request: PluginRequest, _decoder: Endpoint | None) -> bool:
        return True


class AlwaysMultimodal(Settings):
    """The encoding of whatever is not text."""

    def decide(self, request: PluginRequest, _decoder: Endpoint | None) -> bool:
        return request.multimodal


class PrefixBasedPd(Settings):
    """Prefills that are long where they are decoded.

    Attributes:
        producer: Whose account of the caches counts.
        non_cached_tokens: From so many tokens that the decoding pod does not hold; 0: never.
        prompt_tokens: Shorter prompts never.
    """

    producer: Text = field(default=APPROXIMATE, name=PRODUCER_KEY)
    non_cached_tokens: Whole = 0
    prompt_tokens: Whole = 0

    def decide(self, request: PluginRequest, decoder: Endpoint | None) -> bool:
        tokens = request.prompt_tokens
        if not self.non_cached_tokens or tokens < max(self.prompt_tokens, self.non_cached_tokens):
            return False
        hit_tokens = 0
        if decoder is not None:
            match = request.prefix(self.producer, decoder)
            hit_tokens = match.cached_blocks * match.block_tokens
        return tokens - hit_tokens >= self.non_cached_tokens
