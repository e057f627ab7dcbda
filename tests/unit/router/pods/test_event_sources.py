"""Event ports reported by an engine: which reports are used, and which are ignored."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.pod_entry import MODEL_LABEL, PodEntry
from router.pods.pod_set import NOT_REPORTED, EventSources
from router.pods.probe import event_sources
from tests.support.kube.objects import JSON


def source(**fields: Any) -> dict[str, Any]:
    """Return the configuration of one rank."""
    return {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557", **fields}


def told(page: Any, rank: int | None = None) -> EventSources:
    """Return what is parsed from a page."""
    return event_sources(json.dumps(page).encode(), rank)


def labels(**fields: str) -> dict[str, str]:
    """Return labels by their last parts."""
    return {f"kvroute.io/kv-{name.replace('_', '-')}": value for name, value in fields.items()}


def test_one_engine_reports_ports_and_topic() -> None:
    """The ports of events and replays and the topic prefix are read."""
    page = {"0": source(replay_endpoint="tcp://*:6000", topic="kv-events", buffer_steps=10_000)}
    assert told(page).labels == labels(
        events_port="5557", ranks="1", replay_port="6000", events_topic="kv-events"
    )
    assert told({"0": source()}).labels == labels(events_port="5557", ranks="1")


def test_ranks_with_consecutive_ports_are_followed_together() -> None:
    """Ranks behind one port are all followed only if their ports are consecutive; else only the first."""
    row = {str(rank): source(endpoint=f"tcp://10.0.0.1:{5557 + rank}") for rank in range(3)}
    assert told(row).labels == labels(events_port="5557", ranks="3")
    gap = {**row, "2": source(endpoint="tcp://*:7000")}
    assert told(gap).labels == labels(events_port="5557", ranks="1")


def test_a_rank_with_its_own_port_is_followed_alone() -> None:
    """A rank's own entry is used, also if it reports itself as rank 0; other ranks' entries are not."""
    row = {str(rank): source(endpoint=f"tcp://*:{5557 + rank}") for rank in range(3)}
    assert told(row, 2).labels == labels(events_port="5559", ranks="1")
    assert told(row, 0).labels == labels(events_port="5557", ranks="1")
    assert told({"0": source(endpoint="tcp://*:7000")}, 2).labels == labels(events_port="7000", ranks="1")
    assert told(row, 5) == NOT_REPORTED


@pytest.mark.parametrize("off", [{"enable_kv_cache_events": False}, {"publisher": "null"}])
def test_an_engine_may_report_that_it_publishes_nothing(off: dict[str, Any]) -> None:
    """Disabled events are a report, unlike a missing page."""
    assert told({"0": source(**off)}) == EventSources(reported=True, off=True)


@pytest.mark.parametrize(
    "page",
    [
        {},
        [],
        {"x": source()},
        {"0": source(endpoint="inproc://x")},
        {"0": source(endpoint="tcp://*:0")},
        {"0": source(endpoint="tcp://*:99999")},
        {"0": source(topic="\n")},
        {"0": source(endpoint=7)},
        {str(rank): source(endpoint=f"tcp://*:{65_500 + rank}") for rank in range(100)},
        {str(rank): source() for rank in range(300)},
    ],
)
def test_an_invalid_page_is_no_report(page: Any) -> None:
    """After an invalid page the engine is followed as declared."""
    assert told(page) == NOT_REPORTED


@given(
    st.dictionaries(
        st.integers(-2, 4).map(str),
        JSON
        | st.fixed_dictionaries(
            {},
            optional={
                "enable_kv_cache_events": st.booleans(),
                "publisher": st.sampled_from(["zmq", "null", None]),
                "endpoint": st.integers(0, 70_000).map(lambda port: f"tcp://*:{port}"),
                "replay_endpoint": st.integers(0, 70_000).map(lambda port: f"tcp://*:{port}"),
                "topic": st.text(max_size=5),
            },
        ),
        max_size=4,
    ),
    st.none() | st.integers(0, 4),
)
def test_any_report_can_be_followed(page: dict[str, Any], rank: int | None) -> None:
    """Hostile pages give no report, or streams with valid ports."""
    found = told(page, rank)
    stream = PodEntry("a", "b", "10.0.0.1", 1, {**found.labels, MODEL_LABEL: "m"}).stream()
    assert stream is not None
    assert stream.by_rank()
