"""Pickers: scored candidates in, the chosen ones out, best first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from router.config_fields import Settings
from router.plugins.api import Endpoint, PluginRequest, Scored


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
