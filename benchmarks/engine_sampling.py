"""Time to sample a batch from a large vocabulary, compared with one sort of it.

Measures milliseconds for 32 rows of 151,936 logits, with a peaked and with a flat distribution. A sort is the
first step of a naive top-p draw.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.report import Figure
from model_server.requests import SamplingParams
from model_server.worker.sampler import Sampler, SamplingRow

_BATCH = 32
_VOCABULARY = 151_936
# Standard deviation of the logits: at 4 top-p leaves hundreds of tokens, at 1 most of the vocabulary.
_SPREADS = {"sharp": 4.0, "flat": 1.0}
_SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=1, temperature=0.0),
    "all": SamplingParams(max_tokens=1, temperature=0.8),
    "top_k": SamplingParams(max_tokens=1, temperature=0.8, top_k=50),
    "top_p": SamplingParams(max_tokens=1, temperature=0.8, top_p=0.95),
}


def measure(rounds: int, clock: Callable[[], float]) -> Iterator[Figure]:
    """Yield `sample_WAY_SPREAD_b32_ms` per way of sampling, and `sort_SPREAD_b32_ms`."""
    generator = torch.Generator().manual_seed(0)
    for spread, deviation in _SPREADS.items():
        logits = deviation * torch.randn((_BATCH, _VOCABULARY), generator=generator)
        for name, params in _SAMPLINGS.items():
            rows = [SamplingRow(params, seed, 0, arrival_index=seed) for seed in range(_BATCH)]
            used = torch.empty_like(logits)  # sampling modifies it
            launch = partial(Sampler(_BATCH, _VOCABULARY, torch.device("cpu")).launch, rows=rows)
            setting = {"batch": _BATCH, "vocabulary": _VOCABULARY}
            milliseconds = _milliseconds(lambda: launch(used.copy_(logits)).result(), rounds, clock)  # noqa: B023
            yield Figure(f"sample_{name}_{spread}_b32_ms", "ms", milliseconds, setting)
        setting = {"batch": _BATCH, "vocabulary": _VOCABULARY}
        milliseconds = _milliseconds(lambda: logits.sort(dim=-1, descending=True), rounds, clock)  # noqa: B023
        yield Figure(f"sort_{spread}_b32_ms", "ms", milliseconds, setting)


def _milliseconds(work: Callable[[], object], rounds: int, clock: Callable[[], float]) -> float:
    times = []
    for _ in range(rounds + 1):
        started_s = clock()
        work()
        times.append(clock() - started_s)
    return round(1000 * statistics.median(times[1:]), 3)
