"""Adapters that an engine loads again under their old names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import pytest

from router.pods.pod_set import Pod
from router.pods.probe import ProbeResult, served_models
from router.pods.watch import judge
from tests.support.router.bench import entry

ADDRESS = "10.0.0.1:8000"


def after(*pages: Mapping[str, object] | None) -> Pod:
    """Return a pod after probes whose models pages list these adapters and roots; None: refused."""
    pod = Pod(address=ADDRESS, name="a", entry=entry(ADDRESS))
    for number, adapters in enumerate(pages):
        if adapters is None:
            pod = judge(pod, ProbeResult(ADDRESS, False, why="refused", refused=True))
            continue
        # Like vLLM's page, this one has the present time in `created`.
        cards = [{"id": "m", "created": number, "root": "/m"}]
        cards += [
            {"id": name, "parent": "m", "root": root, "created": number} for name, root in adapters.items()
        ]
        models = served_models(json.dumps({"data": cards}).encode())
        assert models is not None
        pod = judge(pod, ProbeResult(ADDRESS, True, models=models))
    return pod


@pytest.mark.parametrize(
    ("pages", "reloaded"),
    [
        ([{"a": "/1"}, {"a": "/1"}, {"a": "/1", "b": "/1"}], set()),
        ([{"a": "/1"}, {"a": "/2"}], {"a"}),
        ([{"a": "/1", "b": "/1"}, {"b": "/1"}, {"a": "/1", "b": "/1"}], {"a"}),
        ([{"a": "/1"}, {}, {"b": "/2"}, {"a": "/1"}], {"a"}),
        ([{"a": "/1"}, {}, {"a": "/1"}, {"a": "/1"}], {"a"}),
        ([{"a": "/1"}, None, {}, {"a": "/2"}], set()),
        ([{"a": "/1"}, {"a": "/2"}, None, {"a": "/2"}], set()),
        ([{"a": None}, {"a": "/1"}, {"a": None}], set()),
    ],
)
def test_a_new_place_or_a_return_is_a_reload(
    pages: Sequence[Mapping[str, object] | None], reloaded: set[str]
) -> None:
    """Within one engine process a changed root, or absence and return, is a reload."""
    assert after(*pages).reloaded == reloaded


def test_remembered_adapters_are_bounded() -> None:
    """An engine that lists ever new and long names makes the router remember at most 1,000 short ones."""
    pages = [
        {f"{'x' * 300 * (number % 2)}{number}-{each}": "/1" for each in range(1500)} for number in range(4)
    ]
    assert len(after(*pages).unloaded) <= 1000
    assert all(len(name) <= 256 for name in after(*pages).unloaded)
