"""Settings of the indexer, and the package's public names."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from indexer import ConfigError, IndexerConfig, PodStream
from indexer.wire.tiers import Tiers


def test_defaults_are_valid() -> None:
    """The default settings are valid, with blocks of 16 tokens."""
    assert IndexerConfig().block_tokens == 16


@pytest.mark.parametrize(
    "name",
    [f.name for f in fields(IndexerConfig) if str(f.type) in ("int", "float")],
)
def test_no_bound_may_be_zero(name: str) -> None:
    """Each number must be positive, except a few that may be 0; the error names the setting."""
    counts = name in ("undeclared_pods", "first_sequence", "speculative_entries")
    with pytest.raises(ConfigError, match=name):
        IndexerConfig(**{name: -1 if counts else 0})
    if counts:
        IndexerConfig(**{name: 0})


@pytest.mark.parametrize(
    "settings",
    [
        {"hash_seed": -1},
        {"hash_seed": 1 << 64},
        {"tier_weights": {"gpu": 1.1}},
        {"tier_weights": {"gpu": 1.0, "cpu": -0.1}},
        {"tier_weights": {"cpu": 0.8}},
        {"events_bind": "ipc://events"},
        {"backend": "etcd"},
    ],
)
def test_wrong_seeds_and_weights_are_refused(settings: dict[str, Any]) -> None:
    """Seeds are unsigned 64-bit numbers; weights are within 0..1 and include the tier gpu."""
    with pytest.raises(ConfigError, match=next(iter(settings))):
        IndexerConfig(**settings)


def test_unknown_tiers_never_beat_known_ones() -> None:
    """An unknown tier has the lowest known weight and loses ties."""
    tiers = Tiers({"gpu": 1.0, "cpu": 0.3, "disk": 0.1}, {"GPU": "gpu"})
    assert tiers.of_medium("HOLOGRAM") == "other"
    assert tiers.weights[tiers.number("other")] == 0.1
    assert tiers.number("disk") < tiers.number("other")


STREAM = PodStream("10.0.0.1:8000", "m", "tcp://10.0.0.1:5557", "tcp://10.0.0.1:5600")


def test_each_rank_has_its_ports_and_its_name() -> None:
    """Rank 0 is named as the pod; other ranks have names of their own and use the ports + rank."""
    ranks = replace(STREAM, ranks=3).by_rank()
    assert [(each.holder, each.events_endpoint, each.replay_endpoint) for each in ranks] == [
        ("10.0.0.1:8000", "tcp://10.0.0.1:5557", "tcp://10.0.0.1:5600"),
        ("10.0.0.1:8000@dp1", "tcp://10.0.0.1:5558", "tcp://10.0.0.1:5601"),
        ("10.0.0.1:8000@dp2", "tcp://10.0.0.1:5559", "tcp://10.0.0.1:5602"),
    ]
    assert STREAM.by_rank() == (STREAM,)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"ranks": 0}, "ranks must be 1..256"),
        ({"ranks": 257}, "ranks must be 1..256"),
        ({"ranks": 2, "snapshot_url": "http://x"}, "snapshot"),
        ({"ranks": 2, "events_endpoint": "inproc://x"}, "no port"),
        ({"ranks": 3, "replay_endpoint": "tcp://[fd00::1]:65534"}, "65534 . rank 2 is beyond 65535"),
    ],
)
def test_ranks_that_cannot_be_are_refused(settings: dict[str, Any], problem: str) -> None:
    """Too many ranks, an endpoint without a port, and ports above 65535 are rejected."""
    with pytest.raises(ConfigError, match=problem):
        replace(STREAM, **settings).by_rank()
