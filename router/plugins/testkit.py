"""What tests of plugins need: requests and endpoints made of few words, and a plugin run on them.

Uses what the router itself uses, so that a plugin that passes here runs there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from router.plugins.api import Endpoint, Filter, Picker, PluginRequest, PrefixMatch, Scored, Scorer
from router.plugins.cache_scorers import APPROXIMATE
from router.plugins.profiles import MaxScorePicker, Profile, WeightedScorer


def request(
    *,
    headers: Mapping[str, str] | None = None,
    prefixes: Mapping[str, PrefixMatch] | None = None,
    **known: Any,
) -> PluginRequest:
    """A request.

    Args:
        headers: By lower-case name.
        prefixes: By address; what the approximate producer knows. Give more under `known` as `PluginRequest`
            has them.
        known: Further attributes of PluginRequest.
    """
    told: dict[str, Any] = {
        "id": "request",
        "model": "model",
        "headers": dict(headers or {}),
        "prompt_tokens": 1000,
        "priority": 0,
        "now_s": 0.0,
        "random": np.random.default_rng(0),
        "prefixes": {APPROXIMATE: dict(prefixes or {})},
    }
    return PluginRequest(**{**told, **known})


def endpoint(name: str, **known: Any) -> Endpoint:
    """An endpoint of this name, at an address made of it.

    Args:
        known: Further attributes of Endpoint.
    """
    return Endpoint(**{"address": f"{name}:8000", "id": f"default/{name}", **known})


def kept(plugin: Filter, asked: PluginRequest, endpoints: Sequence[Endpoint]) -> list[str]:
    """Names of the endpoints that a filter keeps, in its order."""
    picked = Profile("test", [("plugin", plugin)], (), _Every()).run(asked, endpoints)
    return [] if picked is None else [_name(one) for one in picked.endpoints]


def scores(plugin: Scorer, asked: PluginRequest, endpoints: Sequence[Endpoint]) -> dict[str, float]:
    """Scores by name, as the pipeline counts them."""
    profile = Profile("test", (), [WeightedScorer("plugin", plugin)], MaxScorePicker())
    picked = profile.run(asked, endpoints)
    assert picked is not None
    return {_name(one): picked.scores[one.address] for one in endpoints}


def picks(plugin: Picker, asked: PluginRequest, scored: Mapping[str, float]) -> list[str]:
    """Names of the endpoints that a picker picks out of scored ones."""
    chosen = plugin.pick(asked, [Scored(endpoint(name), score) for name, score in scored.items()])
    return [_name(one) for one in chosen]


class _Every:
    """Picks all, in their order."""

    def pick(self, _request: PluginRequest, scored: Sequence[Scored]) -> Sequence[Endpoint]:
        return [one.endpoint for one in scored]


def _name(one: Endpoint) -> str:
    return one.id.partition("/")[2]
