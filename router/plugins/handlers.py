"""The profile handler: which profiles run for a request, and which headers tell the pods of their picks.

One profile picks where the request goes; deciders say whether other pods prefill or encode for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from msgspec import field as option

from router.config_fields import Settings, Text, Whole
from router.plugins.api import Endpoint, PluginRequest
from router.plugins.cache_scorers import APPROXIMATE, PRODUCER_KEY
from router.plugins.profiles import Picked, Profile

PREFILLER_HEADER = "x-prefiller-host-port"
ENCODERS_HEADER = "x-encoder-hosts-ports"
HANDLER_HEADERS = frozenset({PREFILLER_HEADER, ENCODERS_HEADER})
"""Only the router may set these; a client's are taken off."""


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
    """Prefills that are long where they are decoded."""

    producer: Text = option(default=APPROXIMATE, name=PRODUCER_KEY)  # whose account of the caches counts
    non_cached_tokens: Whole = 0  # from so many tokens that the decoding pod does not hold; 0: never
    prompt_tokens: Whole = 0  # shorter prompts never

    def decide(self, request: PluginRequest, decoder: Endpoint | None) -> bool:
        tokens = request.prompt_tokens
        if not self.non_cached_tokens or tokens < max(self.prompt_tokens, self.non_cached_tokens):
            return False
        hit_tokens = 0
        if decoder is not None:
            match = request.prefix(self.producer, decoder)
            hit_tokens = match.cached_blocks * match.block_tokens
        return tokens - hit_tokens >= self.non_cached_tokens


class _Stages(Settings):
    decode: Text = "decode"
    prefill: Text = "prefill"
    encode: Text = "encode"


class _Deciders(Settings):
    prefill: Text | None = None
    encode: Text | None = None


class Disaggregation(Settings):
    """Parameters of disagg-profile-handler."""

    stage_order: Literal["decode-first", "prefill-first"] = "decode-first"
    profiles: _Stages = option(default_factory=_Stages)
    deciders: _Deciders = option(default_factory=_Deciders)


class PrefillApart(Settings):
    """Parameters of pd-profile-handler, the older form: two profiles and one decider."""

    decode_profile: Text = "decode"
    prefill_profile: Text = "prefill"
    decider_plugin_name: Text | None = None
    prefix_plugin_name: Any = None


@dataclass(frozen=True, slots=True)
class Handled:
    """What the profiles chose."""

    primary: Picked  # where the request goes
    targets: Mapping[str, Endpoint]  # first picks by profile; "" is where the request goes
    headers: Mapping[str, str] = field(default_factory=dict)  # to set on the request
    prefill: Endpoint | None = None  # who prefills, where it is not the primary; else None


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a request that another pod may do: where the decider says so, the profile picks the pod."""

    profile: Profile
    decider: Decider

    def run(
        self, request: PluginRequest, endpoints: Sequence[Endpoint], decoder: Endpoint | None
    ) -> Picked | None:
        if not self.decider.decide(request, decoder):
            return None
        return self.profile.run(request, endpoints)


@dataclass(frozen=True, slots=True)
class ProfileHandler:
    """Decoding on one pod, and where a decider says so prefilling and encoding on others."""

    decode: Profile  # picks where the request goes, which fetches from the others' picks
    prefill: Stage | None = None  # None: that stage is never apart
    encode: Stage | None = None
    # Whether prefill is picked before decode, without regard to the latter's cache.
    prefill_first: bool = False

    def run(self, request: PluginRequest, endpoints: Sequence[Endpoint]) -> Handled | None:
        """Pick; a stage whose filters leave nobody stays with the decoding pod.

        Returns:
            None when no endpoint passes the filters of decoding.
        """
        prefilled = encoded = None
        if self.prefill is not None and self.prefill_first:
            prefilled = self.prefill.run(request, endpoints, None)
        decoded = self.decode.run(request, endpoints)
        if decoded is None:
            return None
        first = decoded.endpoints[0]
        targets, headers = {"": first, self.decode.name: first}, {}
        if self.prefill is not None and not self.prefill_first:
            prefilled = self.prefill.run(request, endpoints, first)
        if self.prefill is not None and prefilled is not None:
            targets[self.prefill.profile.name] = prefilled.endpoints[0]
            headers[PREFILLER_HEADER] = prefilled.endpoints[0].address
        if self.encode is not None:
            encoded = self.encode.run(request, endpoints, first)
        if self.encode is not None and encoded is not None:
            targets[self.encode.profile.name] = encoded.endpoints[0]
            headers[ENCODERS_HEADER] = ",".join(endpoint.address for endpoint in encoded.endpoints)
        prefill = prefilled.endpoints[0] if prefilled is not None else None
        apart = prefill is not None and prefill.address != first.address
        return Handled(decoded, targets, headers, prefill if apart else None)
