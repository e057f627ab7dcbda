"""common.repeated_log: few lines per minute and source, and every event is counted."""

from __future__ import annotations

import logging

import pytest
from prometheus_client import CollectorRegistry

from common.repeated_log import REPEATED_EVENTS, RepeatedLog

_log = logging.getLogger("test_repeated_log")


class Clock:
    """Clock that tests set."""

    now_s = 0.0

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self.now_s


def counted(kind: str) -> float:
    """Return the metric's value for a kind of event."""
    registry = CollectorRegistry()
    registry.register(REPEATED_EVENTS)
    return registry.get_sample_value("kvroute_repeated_events_total", {"event": kind}) or 0.0


def test_a_source_has_one_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """The first event of a minute is logged, the others are logged as a number, and all are counted."""
    clock = Clock()
    repeated = RepeatedLog(_log, clock=clock)
    before = counted("one_a_minute")
    for _ in range(1000):
        repeated.event("one_a_minute", "10.0.0.1", "bad client %s", "10.0.0.1:1234")
    assert caplog.messages == ["bad client 10.0.0.1:1234"]
    for minute in range(1, 4):
        clock.now_s = 61.0 * minute
        for _ in range(100):
            repeated.event("one_a_minute", "10.0.0.1", "bad client %s", "10.0.0.1:1234")
    assert caplog.messages[1:] == [
        f"log lines suppressed: source=10.0.0.1 count={number}" for number in (999, 100, 100)
    ]
    assert counted("one_a_minute") - before == 1300


def test_a_quiet_source_is_new_again(caplog: pytest.LogCaptureFixture) -> None:
    """An event more than a minute after the last one is logged."""
    clock = Clock()
    repeated = RepeatedLog(_log, clock=clock)
    for now_s in (0.0, 61.0, 122.0):
        clock.now_s = now_s
        repeated.event("quiet", "a", "at %g", now_s)
    assert caplog.messages == ["at 0", "at 61", "at 122"]


def test_sources_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """Sources beyond the bound share the lines of one source."""
    clock = Clock()
    repeated = RepeatedLog(_log, sources_max=8, clock=clock)
    for number in range(10_000):
        repeated.event("many_sources", f"10.0.{number // 256}.{number % 256}", "source %d", number)
    assert len(caplog.messages) == 9
    clock.now_s = 61.0
    repeated.event("many_sources", "10.0.0.0", "again")
    assert caplog.messages[9:] == [
        "log lines suppressed: source=other sources count=9991",
        "again",
    ]


def test_lines_of_a_source_may_be_more_than_one(caplog: pytest.LogCaptureFixture) -> None:
    """With `lines`, that many events of a source are logged per minute."""
    repeated = RepeatedLog(_log, lines=3, clock=Clock())
    for number in range(10):
        repeated.event("burst", "a", "change %d", number)
    assert caplog.messages == ["change 0", "change 1", "change 2"]


def test_an_error_is_logged_with_its_trace(caplog: pytest.LogCaptureFixture) -> None:
    """An event with an error is logged with its traceback."""
    repeated = RepeatedLog(_log, clock=Clock())
    try:
        raise ValueError("broken")
    except ValueError as error:
        repeated.event("failure", "a", "failed", level=logging.ERROR, error=error)
    assert "ValueError: broken" in caplog.text
