"""Data producers: the prefix matches and attributes that plugins read."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import xxhash
from msgspec import Meta

from indexer import StreamState
from router.config.fields import Settings, Text, Whole
from router.picking.flow_queue import AgentIdentity
from router.plugins.api import PrefixMatch
from router.prompts.request import RouteRequest

if TYPE_CHECKING:
    from indexer import PodMatches
    from router.picking.scheduler import TokenizedRequest

# Average size of a token, as llm-d assumes without a tokenizer.
_TOKEN_BYTES = 4
_BLOCK_TOKENS_MIN = 64


class PrecisePrefix:
    """Prefix matches from the index, which follows the engines' KV events."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens

    def matches(
        self, tokenized: TokenizedRequest, matches: Sequence[PodMatches], pods: Sequence[str]
    ) -> Mapping[str, PrefixMatch]:
        """Return the match of each pod, summed over the prompts of a request."""
        found, blocks = {}, sum(map(len, tokenized.keys)) if matches else 0
        for pod in pods:
            pod_matches = [match[pod] for match in matches]
            weighted_blocks = sum(match.weighted_blocks for match in pod_matches)
            cached_blocks = sum(match.cached_blocks for match in pod_matches)
            found[pod] = PrefixMatch(weighted_blocks, blocks, cached_blocks, self._block_tokens)
        return found

    def dispatched(self, pods: Sequence[str], known: Collection[str]) -> None:
        """Do nothing: KV events report the stored blocks."""


class ApproximatePrefix(Settings):
    """Prefix matches from past picks: an LRU list of prompt block hashes per pod."""

    auto_tune: Annotated[Any, Meta(description="blocks have a fixed size")] = None
    block_size: Annotated[Any, Meta(description="give blockSizeTokens")] = None
    block_size_tokens: Annotated[int, Meta(ge=1, le=1 << 20)] = 16  # of 4 bytes each; at least 64 are used
    max_prefix_blocks_to_match: Annotated[int, Meta(ge=1, le=1 << 20)] = 2048  # longest prefix matched
    max_prefix_tokens_to_match: Whole = 131_072
    lru_capacity_per_server: Annotated[int, Meta(ge=1, le=10_000_000)] = 31_250  # blocks per pod

    def __post_init__(self) -> None:
        self._block_tokens = max(self.block_size_tokens, _BLOCK_TOKENS_MIN)
        by_tokens = self.max_prefix_tokens_to_match // self._block_tokens
        self._blocks_max = min(self.max_prefix_blocks_to_match, by_tokens or self.max_prefix_blocks_to_match)
        self._sent_keys: dict[str, OrderedDict[int, None]] = {}
        self._request_keys: Sequence[int] = ()

    def matches(
        self, tokenized: TokenizedRequest, _matches: Sequence[PodMatches], pods: Sequence[str]
    ) -> Mapping[str, PrefixMatch]:
        # Kept until `dispatched`, as one request is scheduled at a time.
        self._request_keys = self._keys(tokenized.request)
        return {pod: self._match(self._request_keys, self._sent_keys.get(pod, {})) for pod in pods}

    def dispatched(self, pods: Sequence[str], known: Collection[str]) -> None:
        """Record that the last matched request was sent to `pods`; drop pods that are not in `known`."""
        for gone in self._sent_keys.keys() - set(known):
            del self._sent_keys[gone]
        for pod in pods:
            sent = self._sent_keys.setdefault(pod, OrderedDict())
            for key in self._request_keys:
                sent[key] = None
                sent.move_to_end(key)
            while len(sent) > self.lru_capacity_per_server:
                sent.popitem(last=False)

    def state(self) -> dict[str, int]:
        return {pod: len(sent) for pod, sent in self._sent_keys.copy().items()}

    def _keys(self, request: RouteRequest) -> Sequence[int]:
        """Return the chained hashes of the full blocks of the request's text."""
        content = request.body.get("messages", request.body.get("prompt", request.body.get("input")))
        if content is None:
            return ()
        is_text = isinstance(content, str)
        data = content.encode("utf-8", "replace") if is_text else msgspec.json.encode(content)
        size, found = self._block_tokens * _TOKEN_BYTES, []
        key = xxhash.xxh3_64_intdigest((request.model or "").encode("utf-8", "replace"))
        for start in range(0, min(len(data), self._blocks_max * size) - size + 1, size):
            key = xxhash.xxh3_64_intdigest(data[start : start + size], key)
            found.append(key)
        return found

    def _match(self, keys: Sequence[int], sent: Mapping[int, None]) -> PrefixMatch:
        blocks = len(list(takewhile(sent.__contains__, keys)))
        return PrefixMatch(float(blocks), len(keys), blocks, self._block_tokens)


class ImpliedPrefix:
    """Prefix matches where no producer is configured: of the index for EXACT views, else of past picks.

    llm-d uses past picks alone, which are unknown after a restart and do not show evictions.
    """

    def __init__(self, block_tokens: int) -> None:
        self._precise, self._past = PrecisePrefix(block_tokens), ApproximatePrefix()
        self.dispatched, self.state = self._past.dispatched, self._past.state

    def matches(
        self, tokenized: TokenizedRequest, matches: Sequence[PodMatches], pods: Sequence[str]
    ) -> Mapping[str, PrefixMatch]:
        known = [pod for pod in pods if matches and matches[0].state(pod) is StreamState.EXACT]
        past = self._past.matches(tokenized, matches, pods)
        return {**past, **self._precise.matches(tokenized, matches, known)}


class SessionIdProducer(Settings):
    """Attribute with the session id from a header or a cookie."""

    header_name: Text | None = None
    cookie_name: Text | None = None

    def __post_init__(self) -> None:
        if (self.header_name is None) == (self.cookie_name is None):
            raise ValueError("headerName: give either headerName or cookieName")

    def attribute(self, headers: Mapping[str, str]) -> str | None:
        if self.header_name is not None:
            return headers.get(self.header_name.lower())
        return _cookie_value(headers.get("cookie", ""), self.cookie_name or "") or None


# Computes the cached prefix of a prompt per pod.
PrefixProducer = PrecisePrefix | ApproximatePrefix | ImpliedPrefix
AttributeProducer = AgentIdentity | SessionIdProducer  # computes an attribute from the headers


def _cookie_value(header: str, name: str) -> str:
    """Return the value of a cookie in a request's cookie header; "" if it is missing."""
    for pair in header.split(";"):
        key, equals, value = pair.strip().partition("=")
        if equals and key == name:
            return value.strip('"')
    return ""
