"""The candidates of one kind of request, ready for pricing: kept until something about the pods changes.

In: the pod set. Out: for each (model, gateway's subset) who may take it, with their rows on the board.
Filtering hundreds of pods costs more than pricing them, and most requests ask for the same.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from router.candidates import Candidates, candidates_for
from router.pods import PodSet
from router.request import RouteRequest

_KINDS_MAX = 256


class Lineup:
    """Candidates with their places in every table.

    Attributes:
        candidates: Who may take the request, and why others may not.
        addresses: The candidates' addresses, in the order of `rows`.
        asked: The same, as the index is asked for them.
        rows: int64 [candidates], their rows on the board.
    """

    __slots__ = ("_match_rows", "_places", "addresses", "asked", "candidates", "rows")

    def __init__(self, candidates: Candidates, rows: NDArray[np.int64]) -> None:
        self.candidates = candidates
        self.addresses = tuple(pod.address for pod in candidates.pods)
        self.asked = frozenset(self.addresses)
        self.rows = rows
        self._match_rows: Mapping[str, int] = {}
        self._places = np.zeros(0, np.int64)

    def places(self, match_rows: Mapping[str, int]) -> NDArray[np.int64]:
        """int64 [candidates], their rows in a match's arrays."""
        # An index that is asked for the same pods answers in the same order, with the same mapping.
        if match_rows is not self._match_rows:
            places = (match_rows[address] for address in self.addresses)
            self._places = np.fromiter(places, np.int64, len(self.addresses))
            self._match_rows = match_rows
        return self._places


class Lineups:
    """Line-ups by what requests ask for; safe to share between threads."""

    def __init__(self, pods: PodSet) -> None:
        self._pods = pods
        self._generation = -1
        self._known: dict[tuple[str | None, frozenset[str] | None], Lineup] = {}

    def of(self, request: RouteRequest) -> Lineup:
        """Who may take this request.

        Raises:
            NoEndpointError, RequestError: As candidates_for.
        """
        # Read before the pods: whoever changes them after this makes what is kept now outdated.
        generation = self._pods.generation
        if generation != self._generation or len(self._known) >= _KINDS_MAX:
            self._known, self._generation = {}, generation
        known, kind = self._known, (request.model, request.candidates)
        if (lineup := known.get(kind)) is None:
            candidates = candidates_for(request, self._pods.snapshot())
            addresses = [pod.address for pod in candidates.pods]
            lineup = known[kind] = Lineup(candidates, self._pods.board.rows(addresses))
        return lineup
