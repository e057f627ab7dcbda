"""The way from prompt tokens to delivered cached tokens, from the counters of causes and of reports."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from indexer import Cause
from router.observe.metrics import UNCACHEABLE, RouterMetrics

_UNKNOWN = {Cause.UNKNOWN}
_NOT_IN_FLEET = {*_UNKNOWN, *UNCACHEABLE, Cause.EVICTED}
# Causes that end the way of tokens before each stage.
_ENDED = {
    "prompt_tokens": _UNKNOWN,
    "cacheable": _UNKNOWN.union(UNCACHEABLE),
    "cached_in_fleet": _NOT_IN_FLEET,
    "cached_on_pod": {*_NOT_IN_FLEET, Cause.ELSEWHERE},
}


def funnel(metrics: RouterMetrics) -> dict[str, Any]:
    """Return tokens by model and stage, and by model and cause.

    Only prompts whose token ids are known count. Each stage up to `predicted` is a part of the one before it.
    `delivered` is of the requests whose pods reported it, with `delivered_of_prompt_tokens` prompt tokens.
    """
    causes, told = defaultdict[str, Counter[str]](Counter), metrics.values("told_prompt_tokens")
    for (model, cause), tokens in metrics.values("prompt_tokens").items():
        causes[model][cause] = int(tokens)
    models = {}
    for model, by_cause in causes.items():
        models[model] = {
            stage: sum(tokens for cause, tokens in by_cause.items() if cause not in ended)
            for stage, ended in _ENDED.items()
        }
        models[model]["predicted"] = by_cause[Cause.HIT]
        models[model]["delivered"] = int(told.get((model, "cached"), 0))
        models[model]["delivered_of_prompt_tokens"] = int(told.get((model, "all"), 0))
    return {"models": models, "causes": causes}
