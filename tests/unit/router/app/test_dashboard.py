"""What a viewer of the dashboard is sent: bounded samples, reports on them, a page without foreign assets."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from typing import Any

from router.app.dashboard import Watch, dashboard_page
from router.feedback.outcomes import REPORT
from tests.support.router.bench import Bench, completion, ended, ready_pod

PODS = [ready_pod(f"10.0.0.{number}:8000") for number in range(3)]


def events(part: bytes) -> list[tuple[str, Any]]:
    """Return name and content of each event; comments have none."""
    found = re.findall(rb"^event: (\w+)\ndata: (.*)\n\n", part, re.MULTILINE)
    return [(name.decode(), json.loads(data)) for name, data in found]


def decisions(watch: Watch) -> dict[str, Any]:
    """Return the next event of decisions."""
    return next(content for name, content in events(watch.next_part()) if name == "decisions")


def picked(bench: Bench, first: int, count: int) -> None:
    """Pick a pod for this many requests."""
    for number in range(first, first + count):
        bench.router.route(completion(f"r{number}", "some words"), float(number))


def test_a_burst_is_sampled_and_what_is_left_out_is_told() -> None:
    """A part has at most six new decisions, spread over all of them; sent and left out sum to the picks."""
    bench = Bench().with_pods(*PODS)
    watch = Watch(bench.decision_log, lambda: b"{}")
    picked(bench, 0, 3)
    assert [row["request_id"] for row in decisions(watch)["decisions"]] == ["r2", "r1", "r0"]
    picked(bench, 3, 100)
    sent = decisions(watch)
    numbers = [int(row["request_id"].removeprefix("r")) for row in sent["decisions"]]
    assert len(numbers) == 6
    assert max(numbers) - min(numbers) > 80
    assert (sent["left_out"], sent["decided"]) == (94, 103)
    assert "candidates" not in sent["decisions"][0]


def test_a_viewer_first_gets_the_latest_decisions() -> None:
    """A new viewer gets the last 30 decisions without gaps, and none counts as left out."""
    bench = Bench().with_pods(*PODS)
    picked(bench, 0, 50)
    sent = decisions(Watch(bench.decision_log, lambda: b"{}"))
    assert [row["request_id"] for row in sent["decisions"]] == [f"r{number}" for number in range(49, 19, -1)]
    assert sent["left_out"] == 0


def test_reports_on_sent_decisions_follow_once() -> None:
    """A first token and an end are sent once each, for a decision that the viewer has."""
    bench = Bench().with_pods(*PODS)
    watch = Watch(bench.decision_log, lambda: b"{}")
    picked(bench, 0, 1)
    decisions(watch)
    bench.lifecycle.first_token("r0", REPORT, 2.0)
    assert [row["prefill_end"]["after_s"] for row in decisions(watch)["changed"]] == [2.0]
    ended(bench.lifecycle, "r0", REPORT, 3.0, cached_tokens=0)
    assert [row["end"]["after_s"] for row in decisions(watch)["changed"]] == [3.0]
    assert events(watch.next_part()) == []


def test_without_news_a_comment_keeps_the_connection_open() -> None:
    """Every fourth part has the pods; a part without events is a comment, never empty."""
    watch = Watch(Bench().with_pods(*PODS).decision_log, lambda: b'{"pods": []}')
    parts = [watch.next_part() for _ in range(8)]
    assert [[name for name, _ in events(part)] for part in parts] == [
        ["pods"],
        [],
        [],
        [],
        ["pods"],
        [],
        [],
        [],
    ]
    assert all(part == b":\n\n" for at, part in enumerate(parts) if at % 4)


def test_the_page_runs_only_its_own_content() -> None:
    """The policy allows the hashes of the page's script and style, and no other origin."""
    page = dashboard_page()
    assert isinstance(page.body, bytes)
    policy = page.headers["Content-Security-Policy"]
    for tag in (b"script", b"style"):
        (content,) = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), page.body, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content).digest()).decode()
        assert f"{tag.decode()}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert re.findall(rb"https?://|\s(?:src|style|on\w+)=", page.body) == []
