"""Producers: what scorers and filters consume of a request beyond its load: prefix matches and identities."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec
import xxhash
from msgspec import Meta

from router.config.fields import Settings, Text, Whole
from router.picking.sessions import agent_session_id, cookie_value
from router.plugins.api import PrefixMatch
from router.prompts.request import RouteRequest

if TYPE_CHECKING:
    from indexer import PodMatches
    from router.picking.scheduler import TokenizedRequest

# What the reference takes for a token's size where nothing tokenizes.
_TOKEN_BYTES = 4
_BLOCK_TOKENS_LEAST = 64


class PrecisePrefix:
    """What the pods themselves tell, by way of the index."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens

    def matches(
        self, prompted: TokenizedRequest, matches: Sequence[PodMatches], pods: Sequence[str]
    ) -> Mapping[str, PrefixMatch]:
        """Sums over the prompts of a request."""
        found, blocks = {}, sum(map(len, prompted.keys)) if matches else 0
        for pod in pods:
            told = [match[pod] for match in matches]
            weighted_blocks = sum(match.weighted_blocks for match in told)
            cached_blocks = sum(match.cached_blocks for match in told)
            found[pod] = PrefixMatch(weighted_blocks, blocks, cached_blocks, self._block_tokens)
        return found

    def sent(self, pods: Sequence[str], known: Collection[str]) -> None:
        """The pods tell it."""


class ApproximatePrefix(Settings):
    """Record of what was sent where: an LRU of prompt hashes for each pod."""

    auto_tune: bool = True  # would take the block size from the engines, whose events we have
    block_size_tokens: Annotated[int, Meta(ge=1, le=1 << 20)] = 16  # at 4 bytes a token; at least 64 count
    max_prefix_blocks_to_match: Annotated[int, Meta(ge=1, le=1 << 20)] = 2048  # longest prefix looked at
    max_prefix_tokens_to_match: Whole = 131_072
    lru_capacity_per_server: Annotated[int, Meta(ge=1, le=10_000_000)] = 31_250  # blocks kept for each pod

    def __post_init__(self) -> None:
        self._block_tokens = max(self.block_size_tokens, _BLOCK_TOKENS_LEAST)
        by_tokens = self.max_prefix_tokens_to_match // self._block_tokens
        self._blocks_max = min(self.max_prefix_blocks_to_match, by_tokens or self.max_prefix_blocks_to_match)
        self._held: dict[str, OrderedDict[int, None]] = {}
        self._asked: Sequence[int] = ()

    def matches(
        self, prompted: TokenizedRequest, _matches: Sequence[PodMatches], pods: Sequence[str]
    ) -> Mapping[str, PrefixMatch]:
        # Until `sent`: one request is picked for at a time.
        self._asked = self._keys(prompted.request)
        return {pod: self._match(self._asked, self._held.get(pod, {})) for pod in pods}

    def sent(self, pods: Sequence[str], known: Collection[str]) -> None:
        """The request of `matches` was sent to these pods; those that are not known are forgotten."""
        for gone in self._held.keys() - set(known):
            del self._held[gone]
        for pod in pods:
            held = self._held.setdefault(pod, OrderedDict())
            for key in self._asked:
                held[key] = None
                held.move_to_end(key)
            while len(held) > self.lru_capacity_per_server:
                held.popitem(last=False)

    def state(self) -> dict[str, int]:
        return {pod: len(held) for pod, held in self._held.copy().items()}

    def _keys(self, request: RouteRequest) -> Sequence[int]:
        """Chained hashes of the full blocks of what the request says."""
        said = request.body.get("messages", request.body.get("prompt", request.body.get("input")))
        if said is None:
            return ()
        data = said.encode("utf-8", "replace") if isinstance(said, str) else msgspec.json.encode(said)
        size, found = self._block_tokens * _TOKEN_BYTES, []
        key = xxhash.xxh3_64_intdigest((request.model or "").encode("utf-8", "replace"))
        for start in range(0, min(len(data), self._blocks_max * size) - size + 1, size):
            key = xxhash.xxh3_64_intdigest(data[start : start + size], key)
            found.append(key)
        return found

    def _match(self, keys: Sequence[int], held: Mapping[int, None]) -> PrefixMatch:
        blocks = 0
        for key in keys:
            if key not in held:
                break
            blocks += 1
        return PrefixMatch(float(blocks), len(keys), blocks, self._block_tokens)


class AgentIdentity(Settings):
    """The session of an agent, which is its fairness id, too."""

    def attribute(self, headers: Mapping[str, str]) -> str | None:
        return agent_session_id(headers)


class SessionIdProducer(Settings):
    """A session's id out of a header or a cookie."""

    header_name: Text | None = None
    cookie_name: Text | None = None

    def __post_init__(self) -> None:
        if (self.header_name is None) == (self.cookie_name is None):
            raise ValueError("headerName: give either headerName or cookieName")

    def attribute(self, headers: Mapping[str, str]) -> str | None:
        if self.header_name is not None:
            return headers.get(self.header_name.lower())
        return cookie_value(headers.get("cookie", ""), self.cookie_name or "") or None


PrefixProducer = PrecisePrefix | ApproximatePrefix  # knows how much of a prompt each pod holds
AttributeProducer = AgentIdentity | SessionIdProducer  # finds something out from a request's headers
