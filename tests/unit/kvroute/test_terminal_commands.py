"""Commands of the terminal without a router: migration, the text of `top`, colours and hostile names."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest

from kvroute.cli import main
from kvroute.explain import report
from kvroute.terminal import has_colours, screen, styled, table
from kvroute.top import lines

OLD = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: tokenizer  # of the model
- type: queue-scorer
"""
POD: dict[str, Any] = {
    "address": "10.0.0.1:8000",
    "ready": True,
    "why_not": "",
    "asleep": False,
    "failing": "",
    "faults": ["caching_off"],
    "view": "EXACT",
    "scraped": {"kv_usage": 0.25, "waiting": 3},
    "in_flight": {"awaiting": 1, "decoding": 2},
    "prefill_tokens_per_s": 12345.6,
    "tokens_by_tier": {"gpu": 4096},
    "queued_s": 0.5,
}
DECISION: dict[str, Any] = {
    "time": 100.0,
    "pod": "10.0.0.1:8000",
    "pod_name": "",
    "reason": "lowest cost",
    "kind": "chat",
    "model": "evil\x1b[31m\nname",
    "prompt_tokens": 400,
    "predicted_cached_tokens": 300,
    "delivered_cached_tokens": 290,
    "degraded": None,
    "prefill_pod": None,
    "partial": None,
    "session_pod": None,
    "tokens_by_cause": {"hit": 300, "evicted": 100},
    "evicted_s_ago": 12.0,
    "prefix_break": {
        "message": 0,
        "part": "system",
        "offset_tokens": 12,
        "lost_tokens": 1700,
        "lost_s": 0.45,
    },
    "prefill_end": None,
    "end": None,
    "excluded": [{"pod": "10.0.0.2:8000", "reason": "not ready: \x07"}],
    "candidates": [
        {
            "pod": "10.0.0.1:8000",
            "view": "EXACT",
            "score": None,
            "cost_s": 0.35,
            "queued_prefill_s": 0.1,
            "own_prefill_s": 0.1,
            "own_weight": 2.0,
            "copy_s": 0.01,
            "kv_pressure_s": 0.02,
            "extra_s": 0.02,
            "cached_tokens": 300,
            "host_tokens": 16,
            "awaiting": 1,
            "decoding": 2,
        }
    ],
}


def test_a_migrated_file_is_written_and_its_changes_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`kvroute migrate` prints each finding and writes the new file, which needs no changes any more."""
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text(OLD)
    assert main(["migrate", str(old), "--write", str(new)]) == 0
    told = capsys.readouterr().out
    assert f"{old}:4: plugins[0]: tokenizer: llm-d v0.11 removes it" in told
    assert "1 changes" in told
    assert "- type: token-producer  # of the model" in new.read_text()
    assert main(["migrate", str(new)]) == 0
    assert "0 changes" in capsys.readouterr().out


@pytest.mark.parametrize("text", [OLD + "- type: latency-scorer\n", OLD.replace("kind", "king"), ""])
def test_nothing_is_written_of_a_file_that_the_router_would_reject(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    """A file with unsupported or unknown parts ends with status 1 and the line, and writes nothing."""
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text(text)
    assert main(["migrate", str(old), "--write", str(new)]) == 1
    assert not new.exists()
    told = capsys.readouterr()
    assert f"{old}:" in told.out + told.err


def test_top_shows_pods_with_their_share_of_cached_tokens() -> None:
    """A pod's line has state, tiers, queue, requests and the cached share of its latest decisions."""
    text = "\n".join(lines([POD], [DECISION, DECISION | {"time": 98.0}], 100.0))
    assert "latest 2 decisions: 1.0 a second" in text
    assert "600 cached tokens predicted, 580 delivered" in text
    row = next(line for line in text.splitlines() if line.startswith("10.0.0.1:8000"))
    assert row.split() == [
        *("10.0.0.1:8000", "caching_off", "EXACT", "0.500", "3", "75%"),
        *("25%", "12,346", "3", "gpu", "4,096"),
    ]


def test_top_shows_an_unknown_pod_as_unknown() -> None:
    """A pod that was never scraped, and a router without decisions, have dashes instead of invented zeros."""
    pod = POD | {
        "scraped": None,
        "ready": False,
        "why_not": "no answer",
        "tokens_by_tier": {},
        "queued_s": None,
    }
    row = next(line for line in lines([pod], [], 0.0) if line.startswith("10.0.0.1:8000"))
    assert row.split()[1:] == ["no", "answer", "EXACT", "-", "3", "-", "-", "12,346", "-", "-"]


def test_the_parts_of_a_cost_add_up_to_it() -> None:
    """In the table of candidates the seconds of the parts add up to the cost."""
    text = list(report(DECISION, [], is_sent=True, now_s=110.0))
    row = next(line for line in text if line.startswith("> 10.0.0.1:8000")).split()
    assert [float(number) for number in row[3:9]] == [0.35, 0.1, 0.2, 0.01, 0.02, 0.02]
    assert float(row[3]) == pytest.approx(sum(map(float, row[4:9])))


def test_an_explanation_names_the_break_and_the_losses() -> None:
    """The text has the broken message, the lost tokens, their causes and the delivered tokens."""
    text = "\n".join(report(DECISION, ["pod=10.0.0.1:8000: drops a block"], is_sent=True, now_s=110.0))
    for expected in (
        "10 s ago",
        "predicted 300, delivered 290",
        "300 hit, 100 evicted (12 s ago)",
        "drops a block",
        "system: message 0, token 12: 1,700 tokens lost, 0.450 s",
        "10.0.0.2:8000: not a candidate: not ready: ?",
    ):
        assert expected in text


def test_names_of_clients_cannot_control_the_terminal() -> None:
    """Control characters in ids, models and reasons are replaced, so no line of the text is theirs."""
    text = "\n".join(report(DECISION, [], is_sent=False, now_s=0.0)) + "\n".join(
        table(["a"], [["\x1b\n"]], words=(0,))
    )
    assert "\x1b" not in text
    assert "evil?[31m?name" in text


class Terminal(io.StringIO):
    """Standard output that is a terminal."""

    def isatty(self) -> bool:
        """Return True."""
        return True


@pytest.mark.parametrize(
    ("environment", "expected"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_colours_are_for_terminals_that_want_them(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: bool
) -> None:
    """Text is coloured on a terminal only, and not with NO_COLOR or TERM=dumb."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert has_colours() is expected
    assert ("\x1b" in styled("x", "1")) is expected
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert not has_colours()


def test_a_screen_is_cut_at_its_edges_and_left_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines beyond the terminal are not shown, and its former text comes back."""
    monkeypatch.setenv("COLUMNS", "11")
    monkeypatch.setenv("LINES", "2")
    with screen() as show:
        show(["x" * 20] * 3)
    shown = capsys.readouterr().out
    assert shown.startswith("\x1b[?1049h")
    assert shown.endswith("\x1b[?1049l")
    assert shown.count("x" * 10) == shown.count("x") / 10 == 2
