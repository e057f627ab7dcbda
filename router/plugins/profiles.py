"""A scheduling profile and its pickers: one request and its candidates in, picks out.

Filters run one after the other, each on what the last one left; scores are clamped to 0..1, multiplied
by their weights and added up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from router.config_fields import Settings
from router.plugins.api import Endpoint, Filter, Picker, PluginRequest, Scored, Scorer


class PluginError(Exception):
    """A plugin answered something that no plugin may answer; the message names it."""


@dataclass(frozen=True, slots=True)
class WeightedScorer:
    """A scorer of a profile."""

    name: str
    scorer: Scorer
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Picked:
    """What a profile chose."""

    endpoints: Sequence[Endpoint]  # best first; never empty
    scores: dict[str, float]  # weighted sums of all that passed the filters, by address
    # For each scorer its name and what it added to the first endpoint's score.
    parts: Sequence[tuple[str, float]]
    removed: Mapping[str, str]  # those that did not pass, by address, and why


@dataclass(frozen=True, slots=True)
class Profile:
    """One of the configuration's scheduling profiles."""

    name: str
    filters: Sequence[tuple[str, Filter]]
    scorers: Sequence[WeightedScorer]
    picker: Picker

    def run(self, request: PluginRequest, endpoints: Sequence[Endpoint]) -> Picked | None:
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
        return Picked(chosen, {one.endpoint.address: one.score for one in scored}, parts, removed)

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
