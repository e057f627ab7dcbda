"""Scheduling profiles, their pickers, and the profile handlers for single-pod and disaggregated serving.

A profile runs its filters in sequence, then adds up the scores, each clamped to 0..1 and weighted. One
profile picks the destination; deciders decide whether other pods prefill or encode for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol

import numpy as np
from msgspec import Meta
from msgspec import field as option
from numpy.typing import NDArray

from router.config.fields import Settings, Text, Whole
from router.plugins.api import Endpoint, Filter, Picker, PluginRequest, Scored, Scorer
from router.plugins.scorers import IMPLIED, PRODUCER_KEY


class PluginError(Exception):
    """A plugin returned an invalid result; the message names the plugin."""


@dataclass(frozen=True, slots=True)
class WeightedScorer:
    """Scorer of a profile, with its weight."""

    name: str
    scorer: Scorer
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class ProfileResult:
    """Endpoints that a profile picked, with scores and the removed endpoints."""

    profile: str  # name of the profile
    endpoints: Sequence[Endpoint]  # best first; never empty
    scores: dict[str, float]  # weighted sum by address, of all endpoints that passed the filters
    score_parts: Sequence[tuple[str, float]]  # scorers and their part of the first endpoint's score
    removed: Mapping[str, str]  # reason by address, of the endpoints that a filter removed


@dataclass(frozen=True, slots=True)
class Profile:
    """Scheduling profile of a configuration: filters, scorers and a picker."""

    name: str
    filters: Sequence[tuple[str, Filter]]
    scorers: Sequence[WeightedScorer]
    picker: Picker

    def run(self, request: PluginRequest, endpoints: Sequence[Endpoint]) -> ProfileResult | None:
        """Return the picked endpoints; None if no endpoint passes the filters.

        Raises:
            PluginError: A plugin returned an invalid result.
        """
        removed: dict[str, str] = {}
        remaining = {endpoint.address for endpoint in endpoints}
        for name, narrow in self.filters:
            endpoints = narrow.filter(request, endpoints)
            left = {endpoint.address for endpoint in endpoints}
            if not left <= remaining:
                raise PluginError(f"plugin {name}: filter must return a subset of the given endpoints")
            if not left:
                return None
            removed |= dict.fromkeys(remaining - left, f"removed by filter {name}")
            remaining = left
        totals = [0.0] * len(endpoints)
        columns = [self._weighted(scorer, request, endpoints) for scorer in self.scorers]
        for column in columns:
            totals = [total + score for total, score in zip(totals, column, strict=True)]
        scored = [Scored(endpoint, total) for endpoint, total in zip(endpoints, totals, strict=True)]
        chosen = self.picker.pick(request, scored)
        indices = {endpoint.address: index for index, endpoint in enumerate(endpoints)}
        if not chosen or not all(endpoint.address in indices for endpoint in chosen):
            raise PluginError("the picker must return at least one of the given endpoints")
        first = indices[chosen[0].address]
        parts = [(scorer.name, column[first]) for scorer, column in zip(self.scorers, columns, strict=True)]
        sums = {one.endpoint.address: one.score for one in scored}
        return ProfileResult(self.name, chosen, sums, parts, removed)

    def _weighted(
        self, scorer: WeightedScorer, request: PluginRequest, endpoints: Sequence[Endpoint]
    ) -> list[float]:
        scores = scorer.scorer.score(request, endpoints)
        if len(scores) != len(endpoints):
            raise PluginError(
                f"plugin {scorer.name}: score must return one score for each of {len(endpoints)} endpoints, "
                f"got {len(scores)}"
            )
        return [0.0 if math.isnan(one) else min(1.0, max(0.0, one)) * scorer.weight for one in scores]


class _Picker(Settings):
    """Base of pickers: chooses the first endpoints of an order that subclasses define."""

    max_num_of_endpoints: Annotated[int, Meta(ge=1, le=64)] = 1

    def pick(self, request: PluginRequest, scored: Sequence[Scored]) -> Sequence[Endpoint]:
        scores = np.array([one.score for one in scored])
        order = self._order(scores, request.random)
        return [scored[index].endpoint for index in order[: self.max_num_of_endpoints]]

    def _order(self, scores: NDArray[np.float64], random: np.random.Generator) -> NDArray[np.int64]:
        raise NotImplementedError


class MaxScorePicker(_Picker):
    """Picks the highest scores; endpoints of equal score are in random order."""

    def _order(self, scores: NDArray[np.float64], random: np.random.Generator) -> NDArray[np.int64]:
        order: NDArray[np.int64] = np.lexsort((random.random(len(scores)), -scores))
        return order


class RandomPicker(_Picker):
    """Picks at random, regardless of the scores."""

    def _order(self, scores: NDArray[np.float64], random: np.random.Generator) -> NDArray[np.int64]:
        return random.permutation(len(scores))


class WeightedRandomPicker(_Picker):
    """Picks at random in proportion to the scores, without replacement; uniformly if all scores are 0.

    Algorithm A-Res of Efraimidis and Spirakis: order by U ** (1 / score), with U uniform in 0..1.
    """

    def _order(self, scores: NDArray[np.float64], random: np.random.Generator) -> NDArray[np.int64]:
        if not scores.any():
            return random.permutation(len(scores))
        # Use logarithms, because the power underflows to 0 for small scores.
        with np.errstate(divide="ignore"):
            keys = np.log(1.0 - random.random(len(scores))) / scores
        return np.argsort(-keys, kind="stable")


_PREFILLER_HEADER = "x-prefiller-host-port"
_ENCODERS_HEADER = "x-encoder-hosts-ports"
_DATA_PARALLEL_HEADER = "x-data-parallel-host-port"
_AT_DECIDER = f"its decider has {PRODUCER_KEY}"


class Decider(Protocol):
    """Decides whether another pod executes a stage (prefill or encode) of a request."""

    def decide(self, request: PluginRequest, decoder: Endpoint | None, /) -> bool:
        """Return whether another pod than the decoder (None: not picked yet) executes the stage."""


class AlwaysPdDecider(Settings):
    """Decider that disaggregates every prefill."""

    def decide(self, _request: PluginRequest, _decoder: Endpoint | None) -> bool:
        return True


class AlwaysMultimodalDecider(Settings):
    """Decider that disaggregates the encoding of every multimodal prompt."""

    def decide(self, request: PluginRequest, _decoder: Endpoint | None) -> bool:
        return request.multimodal


class PrefixBasedPdDecider(Settings):
    """Decider that disaggregates prefills with many uncached tokens at the decoder."""

    producer: Text = option(default=IMPLIED, name=PRODUCER_KEY)  # source of the prefix matches
    non_cached_tokens: Whole = 0  # uncached tokens from which on a prefill is disaggregated; 0: never
    prompt_tokens: Whole = 0  # minimum prompt length

    def decide(self, request: PluginRequest, decoder: Endpoint | None) -> bool:
        tokens = request.prompt_tokens
        if not self.non_cached_tokens or tokens < max(self.prompt_tokens, self.non_cached_tokens):
            return False
        hit_tokens = 0
        if decoder is not None:
            match = request.prefix(self.producer, decoder)
            hit_tokens = match.cached_blocks * match.block_tokens
        return tokens - hit_tokens >= self.non_cached_tokens


_Port = Annotated[int, Meta(ge=0, le=65535)]


class _Stages(Settings):
    decode: Text = "decode"
    prefill: Text = "prefill"
    encode: Text = "encode"


class _Deciders(Settings):
    prefill: Text | None = None
    encode: Text | None = None


class DisaggHandlerSettings(Settings):
    """Handler of separate decode, prefill and encode pods; its flat parameters take precedence."""

    stage_order: Literal["decode-first", "prefill-first"] = "decode-first"
    profiles: _Stages = option(default_factory=_Stages)
    deciders: _Deciders = option(default_factory=_Deciders)
    decode_profile: Text | None = None
    prefill_profile: Text | None = None
    encode_profile: Text | None = None
    prefill_decider_plugin_name: Text | None = None
    decider_plugin_name: Text | None = None  # of prefill, as in pd-profile-handler
    encode_decider_plugin_name: Text | None = None
    primary_port: _Port = 0  # see ProfileHandler
    prefix_plugin_type: Annotated[Any, Meta(description=_AT_DECIDER)] = None
    prefix_plugin_name: Annotated[Any, Meta(description=_AT_DECIDER)] = None
    producer: Annotated[Any, Meta(description=_AT_DECIDER)] = option(default=None, name=PRODUCER_KEY)

    def __post_init__(self) -> None:
        stages, deciders = self.profiles, self.deciders
        stages.decode = self.decode_profile or stages.decode
        stages.prefill = self.prefill_profile or stages.prefill
        stages.encode = self.encode_profile or stages.encode
        decider = self.prefill_decider_plugin_name or self.decider_plugin_name
        deciders.prefill = decider or deciders.prefill
        deciders.encode = self.encode_decider_plugin_name or deciders.encode


class PdHandlerSettings(DisaggHandlerSettings):
    """Handler of separate decode and prefill pods, which always has a decider."""

    decider_plugin_name: Text | None = "prefix-based-pd-decider"


class DataParallelHandlerSettings(Settings):
    """Handler of one profile, whose pick is sent to one port of its pod, that of a sidecar."""

    primary_port: _Port = 8000  # see ProfileHandler


@dataclass(frozen=True, slots=True)
class HandlerResult:
    """Picks of all profiles for one request."""

    primary: ProfileResult  # picks the destination
    targets: Mapping[str, Endpoint]  # first pick by profile name; "" is the destination
    headers: Mapping[str, str] = field(default_factory=dict)  # to set on the request
    prefill: Endpoint | None = None  # endpoint that prefills, if it is not the destination
    port: int = 0  # port of the destinations in the place of their own; 0: their own


@dataclass(frozen=True, slots=True)
class Stage:
    """Stage of a request that another pod may execute: the decider decides, the profile picks the pod."""

    profile: Profile
    decider: Decider


@dataclass(frozen=True, slots=True)
class ProfileHandler:
    """Picks a pod to decode and, if a decider decides so, other pods to prefill and encode."""

    decode: Profile  # picks the destination, which fetches KV blocks and embeddings from the other picks
    prefill: Stage | None = None  # None: never disaggregated
    encode: Stage | None = None
    prefill_first: bool = False  # whether prefill is picked before decode, without regard to decode's cache
    # Port of the pods' sidecars, which receive all requests and the picked rank's address; 0: none.
    primary_port: int = 0

    def run(self, request: PluginRequest, endpoints: Sequence[Endpoint]) -> HandlerResult | None:
        """Return the picks, None without one to decode; a stage without endpoints stays at that pod."""
        prefilled = _picked(self.prefill, request, endpoints, None) if self.prefill_first else None
        decoded = self.decode.run(request, endpoints)
        if decoded is None:
            return None
        first = decoded.endpoints[0]
        if not self.prefill_first:
            prefilled = _picked(self.prefill, request, endpoints, first)
        encoded = _picked(self.encode, request, endpoints, first)
        targets, headers = {"": first, decoded.profile: first}, {}
        prefill = None
        if prefilled is not None:
            prefill = targets[prefilled.profile] = prefilled.endpoints[0]
            headers[_PREFILLER_HEADER] = prefill.address
        if encoded is not None:
            targets[encoded.profile] = encoded.endpoints[0]
            headers[_ENCODERS_HEADER] = ",".join(endpoint.address for endpoint in encoded.endpoints)
        if prefill is not None and prefill.address == first.address:
            prefill = None
        if self.primary_port:
            headers[_DATA_PARALLEL_HEADER] = first.address
        return HandlerResult(decoded, targets, headers, prefill, self.primary_port)


def _picked(
    stage: Stage | None, request: PluginRequest, endpoints: Sequence[Endpoint], decoder: Endpoint | None
) -> ProfileResult | None:
    if stage is None or not stage.decider.decide(request, decoder):
        return None
    return stage.profile.run(request, endpoints)
