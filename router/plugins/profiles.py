"""Scheduling profiles, their pickers, and the handler that says which of them run: candidates in, picks out.

Filters run one after the other, each on what the last one left; scores are clamped to 0..1, multiplied
by their weights and added up. One profile picks where the request goes; deciders say whether other pods
prefill or encode for it.
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
from router.plugins.cache_scorers import APPROXIMATE, PRODUCER_KEY


class PluginError(Exception):
    """A plugin answered something that no plugin may answer; the message names it."""


@dataclass(frozen=True, slots=True)
class WeightedScorer:
    """A scorer of a profile."""

    name: str
    scorer: Scorer
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class ProfileResult:
    """Choice of a profile."""

    profile: str  # its name
    endpoints: Sequence[Endpoint]  # best first; never empty
    scores: dict[str, float]  # weighted sums of all that passed the filters, by address
    parts: Sequence[tuple[str, float]]  # by scorer, what it added to the first endpoint's score
    removed: Mapping[str, str]  # those that did not pass, by address, and why


@dataclass(frozen=True, slots=True)
class Profile:
    """One of the configuration's scheduling profiles."""

    name: str
    filters: Sequence[tuple[str, Filter]]
    scorers: Sequence[WeightedScorer]
    picker: Picker

    def run(self, request: PluginRequest, endpoints: Sequence[Endpoint]) -> ProfileResult | None:
        """Picks; None when no endpoint passes the filters.

        Raises:
            PluginError: A plugin answered something else than its protocol says.
        """
        removed: dict[str, str] = {}
        known = {endpoint.address for endpoint in endpoints}
        for name, narrow in self.filters:
            endpoints = narrow.filter(request, endpoints)
            left = {endpoint.address for endpoint in endpoints}
            if not left <= known:
                raise PluginError(f"plugin {name}: filter must answer endpoints that it was given")
            if not left:
                return None
            removed |= dict.fromkeys(known - left, f"removed by filter {name}")
            known = left
        totals = [0.0] * len(endpoints)
        columns = [self._weighted(scorer, request, endpoints) for scorer in self.scorers]
        for column in columns:
            totals = [total + score for total, score in zip(totals, column, strict=True)]
        scored = [Scored(endpoint, total) for endpoint, total in zip(endpoints, totals, strict=True)]
        chosen = self.picker.pick(request, scored)
        places = {endpoint.address: place for place, endpoint in enumerate(endpoints)}
        if not chosen or not all(endpoint.address in places for endpoint in chosen):
            raise PluginError("the picker must answer at least one endpoint, of those that it was given")
        first = places[chosen[0].address]
        parts = [(scorer.name, column[first]) for scorer, column in zip(self.scorers, columns, strict=True)]
        return ProfileResult(
            self.name, chosen, {one.endpoint.address: one.score for one in scored}, parts, removed
        )

    def _weighted(
        self, scorer: WeightedScorer, request: PluginRequest, endpoints: Sequence[Endpoint]
    ) -> list[float]:
        scores = scorer.scorer.score(request, endpoints)
        if len(scores) != len(endpoints):
            raise PluginError(
                f"plugin {scorer.name}: score must answer one score for each of {len(endpoints)} endpoints, "
                f"not {len(scores)}"
            )
        return [0.0 if math.isnan(one) else min(1.0, max(0.0, one)) * scorer.weight for one in scores]


class _Picker(Settings):
    """Chooses the first so many of an order."""

    max_num_of_endpoints: Annotated[int, Meta(ge=1, le=64)] = 1

    def pick(self, request: PluginRequest, scored: Sequence[Scored]) -> Sequence[Endpoint]:
        scores = np.array([one.score for one in scored])
        order = self._order(scores, request.random)
        return [scored[place].endpoint for place in order[: self.max_num_of_endpoints]]

    def _order(self, scores: NDArray[np.float64], random: np.random.Generator) -> NDArray[np.int64]:
        raise NotImplementedError


class MaxScorePicker(_Picker):
    """Highest score first; equals in random order."""

    def _order(self, scores: NDArray[np.float64], random: np.random.Generator) -> NDArray[np.int64]:
        order: NDArray[np.int64] = np.lexsort((random.random(len(scores)), -scores))
        return order


class RandomPicker(_Picker):
    """Any, whatever the scores."""

    def _order(self, scores: NDArray[np.float64], random: np.random.Generator) -> NDArray[np.int64]:
        return random.permutation(len(scores))


class WeightedRandomPicker(_Picker):
    """At random in proportion to the scores, without putting back; all alike where all scores are 0.

    Each draws U ** (1 / score), the greatest is first: Efraimidis and Spirakis' A-Res.
    """

    def _order(self, scores: NDArray[np.float64], random: np.random.Generator) -> NDArray[np.int64]:
        if not scores.any():
            return random.permutation(len(scores))
        # In logarithms: a small score's power would be 0 for all of them.
        with np.errstate(divide="ignore"):
            keys = np.log(1.0 - random.random(len(scores))) / scores
        return np.argsort(-keys, kind="stable")


_PREFILLER_HEADER = "x-prefiller-host-port"
_ENCODERS_HEADER = "x-encoder-hosts-ports"


class Decider(Protocol):
    """Decides for one stage."""

    def decide(self, request: PluginRequest, decoder: Endpoint | None, /) -> bool:
        """Whether the stage is done apart.

        Args:
            decoder: Where the request will be decoded; None while that is not picked.
        """


class AlwaysPdDecider(Settings):
    """Every prefill."""

    def decide(self, _request: PluginRequest, _decoder: Endpoint | None) -> bool:
        return True


class AlwaysMultimodalDecider(Settings):
    """The encoding of whatever is not text."""

    def decide(self, request: PluginRequest, _decoder: Endpoint | None) -> bool:
        return request.multimodal


class PrefixBasedPdDecider(Settings):
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


class DisaggHandlerSettings(Settings):
    """Parameters of disagg-profile-handler."""

    stage_order: Literal["decode-first", "prefill-first"] = "decode-first"
    profiles: _Stages = option(default_factory=_Stages)
    deciders: _Deciders = option(default_factory=_Deciders)


class PdHandlerSettings(Settings):
    """Parameters of pd-profile-handler, the older form: two profiles and one decider."""

    decode_profile: Text = "decode"
    prefill_profile: Text = "prefill"
    decider_plugin_name: Text | None = None
    prefix_plugin_name: Any = None


@dataclass(frozen=True, slots=True)
class HandlerResult:
    """Choice of all profiles."""

    primary: ProfileResult  # where the request goes
    targets: Mapping[str, Endpoint]  # first picks by profile; "" is where the request goes
    headers: Mapping[str, str] = field(default_factory=dict)  # to set on the request
    prefill: Endpoint | None = None  # who prefills, where it is not the primary; else None


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a request that another pod may do: where the decider says so, the profile picks the pod."""

    profile: Profile
    decider: Decider


@dataclass(frozen=True, slots=True)
class ProfileHandler:
    """Decoding on one pod, and where a decider says so prefilling and encoding on others."""

    decode: Profile  # picks where the request goes, which fetches from the others' picks
    prefill: Stage | None = None  # None: that stage is never apart
    encode: Stage | None = None
    prefill_first: bool = False  # whether prefill is picked before decode, regardless of the latter's cache

    def run(self, request: PluginRequest, endpoints: Sequence[Endpoint]) -> HandlerResult | None:
        """Pick; a stage whose filters leave nobody stays with the decoding pod.

        Returns:
            None when no endpoint passes the filters of decoding.
        """
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
        apart = prefill is not None and prefill.address != first.address
        return HandlerResult(decoded, targets, headers, prefill if apart else None)


def _picked(
    stage: Stage | None, request: PluginRequest, endpoints: Sequence[Endpoint], decoder: Endpoint | None
) -> ProfileResult | None:
    if stage is None or not stage.decider.decide(request, decoder):
        return None
    return stage.profile.run(request, endpoints)
