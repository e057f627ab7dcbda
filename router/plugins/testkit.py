"""Test kit for plugins: builds requests and endpoints with defaults, and runs one plugin on them.

Plugins run in the router's own Profile, so the same checks apply.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from router.plugins.api import Endpoint, Filter, Picker, PluginRequest, PrefixMatch, Scored, Scorer
from router.plugins.profiles import MaxScorePicker, Profile, WeightedScorer
from router.plugins.scorers import IMPLIED


def request(
    *,
    headers: Mapping[str, str] | None = None,
    prefixes: Mapping[str, PrefixMatch] | None = None,
    **known: Any,
) -> PluginRequest:
    """Return a request with default values.

    Args:
        headers: By lower-case name.
        prefixes: Matches by address for plugins that name no producer. To set those of a producer, pass a
            mapping by producer and address in `known` instead.
        known: Other fields of PluginRequest.
    """
    defaults: dict[str, Any] = {
        "id": "request",
        "model": "model",
        "headers": dict(headers or {}),
        "prompt_tokens": 1000,
        "priority": 0,
        "now_s": 0.0,
        "random": np.random.default_rng(0),
        "prefixes": {IMPLIED: dict(prefixes or {})},
    }
    return PluginRequest(**{**defaults, **known})


def endpoint(name: str, **known: Any) -> Endpoint:
    """Return an endpoint of this name at the address "NAME:8000"; `known` are other fields of Endpoint."""
    return Endpoint(**{"address": f"{name}:8000", "id": f"default/{name}", **known})


def kept(plugin: Filter, asked: PluginRequest, endpoints: Sequence[Endpoint]) -> list[str]:
    """Return the names of the endpoints that a filter keeps, in its order."""
    picked = Profile("test", [("plugin", plugin)], (), _AllPicker()).run(asked, endpoints)
    return [] if picked is None else [_name(one) for one in picked.endpoints]


def scores(plugin: Scorer, asked: PluginRequest, endpoints: Sequence[Endpoint]) -> dict[str, float]:
    """Return the clamped scores by endpoint name."""
    profile = Profile("test", (), [WeightedScorer("plugin", plugin)], MaxScorePicker())
    picked = profile.run(asked, endpoints)
    assert picked is not None
    return {_name(one): picked.scores[one.address] for one in endpoints}


def picks(plugin: Picker, asked: PluginRequest, scored: Mapping[str, float]) -> list[str]:
    """Return the names of the endpoints that a picker chooses, given scores by name."""
    chosen = plugin.pick(asked, [Scored(endpoint(name), score) for name, score in scored.items()])
    return [_name(one) for one in chosen]


class _AllPicker:
    """Picks all endpoints in their order."""

    def pick(self, _request: PluginRequest, scored: Sequence[Scored]) -> Sequence[Endpoint]:
        return [one.endpoint for one in scored]


def _name(one: Endpoint) -> str:
    return one.id.partition("/")[2]
