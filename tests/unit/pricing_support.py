"""Pods on a board, and a request priced on them, without a router around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from router.picking.cost import CACHE_HIT, CostInputs, CostParameters, cost_breakdowns
from router.pods.engine_load import EngineLoad
from router.pods.load_table import PodBoard

PARAMETERS = CostParameters()


@dataclass(frozen=True)
class Queued:
    """A request that awaits its first token."""

    tokens: int
    sent_s: float = 0.0


@dataclass(frozen=True)
class Known:
    """What is known of one pod; its name is its place."""

    cached_tokens: int = 0
    host_tokens: int = 0
    queue: Sequence[Queued] = ()
    decoding: int = 0
    load: EngineLoad | None = None
    tokens_per_s: float = 1000.0


IDLE = Known()


def load(**told: Any) -> EngineLoad:
    """An account of the time 0.0."""
    account = {"waiting": 0, "running": 0, "kv_usage": 0.0, "kv_capacity_tokens": None, "scraped_s": 0.0}
    return EngineLoad(**(account | told))


@dataclass
class Priced:
    """Prices of one request, in the order of the pods."""

    breakdowns: NDArray[Any]
    board: PodBoard = field(repr=False)

    def part(self, name: str) -> list[float]:
        """One part of the price."""
        parts: list[float] = self.breakdowns[name].tolist()
        return parts

    @property
    def best(self) -> int:
        """The place of the cheapest."""
        return int(self.breakdowns["cost_s"].argmin())


def priced(
    prompt_tokens: int,
    *pods: Known,
    now_s: float = 0.0,
    parameters: CostParameters = PARAMETERS,
    extra_s: Sequence[float] = (),
) -> Priced:
    """Prices a request on these pods."""
    board = PodBoard()
    names = [f"a:{place}" for place in range(len(pods))]
    board.declare(names)
    for name, pod in zip(names, pods, strict=True):
        if pod.load is not None:
            board.scraped(name, pod.load)
        for number in range(pod.decoding):
            board.end_prefill(name, board.begin(name, 0, float(-number)), 0.0)
        for queued in pod.queue:
            board.begin(name, queued.tokens, queued.sent_s)
    board.learnt({name: pod.tokens_per_s for name, pod in zip(names, pods, strict=True)}, 1000.0)
    hits = np.array([(pod.cached_tokens, pod.host_tokens) for pod in pods], CACHE_HIT)
    facts = CostInputs(float(prompt_tokens), now_s, board.fleet_tokens_per_s, 100.0)
    rows, extra = board.rows(names), np.array(extra_s, np.float64)
    return Priced(cost_breakdowns(board.pods, rows, hits, extra, facts, parameters.record()[0]), board)
