"""Test kit of the cost model: pods in a load table, and the cost of a request on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from router.picking.cost import CACHE_HIT, CostInputs, CostParameters, cost_breakdowns
from router.pods.engine_load import EngineLoad
from router.pods.load_table import PodLoadTable

PARAMETERS = CostParameters()


@dataclass(frozen=True)
class Queued:
    """Request that awaits its first token."""

    tokens: int
    sent_s: float = 0.0


@dataclass(frozen=True)
class PodState:
    """Cache, queue, metrics and prefill rate of one pod."""

    cached_tokens: int = 0
    host_tokens: int = 0
    queue: Sequence[Queued] = ()
    decoding: int = 0
    load: EngineLoad | None = None
    tokens_per_s: float = 1000.0


IDLE = PodState()


def load(**fields: Any) -> EngineLoad:
    """Return engine metrics of an idle pod at time 0.0, with some fields replaced."""
    defaults = {"waiting": 0, "running": 0, "kv_usage": 0.0, "kv_capacity_tokens": None, "scraped_s": 0.0}
    return EngineLoad(**(defaults | fields))


@dataclass
class Costs:
    """Costs of one request, in the order of the pods."""

    breakdowns: NDArray[Any]
    load_table: PodLoadTable = field(repr=False)

    def part(self, name: str) -> list[float]:
        """Return one field of the cost breakdown of every pod."""
        values: list[float] = self.breakdowns[name].tolist()
        return values

    @property
    def best(self) -> int:
        """Return the index of the pod with the lowest cost."""
        return int(self.breakdowns["cost_s"].argmin())


def costs_on(
    prompt_tokens: int,
    *pods: PodState,
    now_s: float = 0.0,
    parameters: CostParameters = PARAMETERS,
    extra_s: Sequence[float] = (),
) -> Costs:
    """Compute the cost of a request on these pods."""
    load_table = PodLoadTable()
    names = [f"a:{index}" for index in range(len(pods))]
    load_table.declare(names)
    for name, pod in zip(names, pods, strict=True):
        if pod.load is not None:
            load_table.scraped(name, pod.load)
        for number in range(pod.decoding):
            load_table.end_prefill(name, load_table.begin(name, 0, float(-number)), 0.0)
        for queued in pod.queue:
            load_table.begin(name, queued.tokens, queued.sent_s)
    load_table.set_observed({name: pod.tokens_per_s for name, pod in zip(names, pods, strict=True)}, 1000.0)
    hits = np.array([(pod.cached_tokens, pod.host_tokens) for pod in pods], CACHE_HIT)
    inputs = CostInputs(float(prompt_tokens), now_s, load_table.fleet_tokens_per_s, 100.0)
    rows, extra = load_table.rows(names), np.array(extra_s, np.float64)
    return Costs(
        cost_breakdowns(load_table.pods, rows, hits, extra, inputs, parameters.record()[0]), load_table
    )
