"""Settings of the indexer, and what the package offers."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

import indexer
from indexer import ConfigError, IndexerConfig
from indexer.tiers import TierWeights


def test_defaults_are_valid() -> None:
    """A config without arguments can be made, with blocks of 16 tokens."""
    assert IndexerConfig().block_tokens == 16


@pytest.mark.parametrize(
    "name",
    [f.name for f in fields(IndexerConfig) if f.name not in ("hash_seed", "tier_weights", "topic_prefix")],
)
def test_no_bound_may_be_zero(name: str) -> None:
    """Each number of the config is a size or a time, and its error names it."""
    with pytest.raises(ConfigError, match=name):
        IndexerConfig(**{name: 0})


@pytest.mark.parametrize(
    "settings",
    [
        {"hash_seed": -1},
        {"hash_seed": 1 << 64},
        {"tier_weights": {"gpu": 1.1}},
        {"tier_weights": {"gpu": 1.0, "cpu": -0.1}},
        {"tier_weights": {"cpu": 0.8}},
    ],
)
def test_wrong_seeds_and_weights_are_refused(settings: dict[str, Any]) -> None:
    """Seeds are unsigned 64-bit numbers; weights are within 0..1 and name the GPU."""
    with pytest.raises(ConfigError, match=next(iter(settings))):
        IndexerConfig(**settings)


def test_unknown_tiers_never_beat_known_ones() -> None:
    """An unknown tier weighs as the slowest known one, and loses a tie against it."""
    weights = TierWeights({"gpu": 1.0, "cpu": 0.3, "disk": 0.1})
    assert weights["holographic"] == 0.1
    assert weights.best(["holographic", "disk"]) == "disk"
    assert weights.best(["disk", "cpu", "holographic"]) == "cpu"


def test_the_public_names_are_these() -> None:
    """What other packages may use is listed once, and exists."""
    assert sorted(indexer.__all__) == sorted(
        [
            "ConfigError",
            "IndexStats",
            "IndexerConfig",
            "IndexerError",
            "KvIndexer",
            "ListenError",
            "PayloadError",
            "PodMatch",
            "PodStream",
            "StreamState",
            "TokenError",
        ]
    )
    assert all(hasattr(indexer, name) for name in indexer.__all__)
