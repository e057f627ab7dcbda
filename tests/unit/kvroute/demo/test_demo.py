"""Load and report of the demonstration."""

from __future__ import annotations

import io
import sys
from collections import Counter

import pytest

from kvroute.demo.load import BURST, CONVERSATIONS, NEW, QUESTIONS, SMALL_LOAD, Load, waves
from kvroute.demo.report import KVROUTE, LEAST_REQUESTS, ROUND_ROBIN, Answer, report, table


@pytest.mark.parametrize("load", [Load(), SMALL_LOAD])
def test_each_session_takes_its_turns_in_order(load: Load) -> None:
    """Every session's turns come once and in order, one per wave, so that each follows its answer."""
    seen: Counter[str] = Counter()
    for wave in waves(load, seed=1):
        assert len({ask.session.name for ask in wave}) == len(wave)
        for ask in wave:
            assert ask.turn == seen[ask.session.name]
            seen[ask.session.name] += 1
            assert ask.turn < len(ask.session.turns)
    assert len(seen) == load.conversations + load.tool_loops + load.new_requests
    assert len(QUESTIONS) > load.turns


def test_rounds_are_repeatable_and_differ() -> None:
    """The same seed gives the same messages in the same order; no session of another seed begins alike."""

    def beginnings(seed: int) -> list[object]:
        return [ask.session.turns[0] for wave in waves(Load(), seed) for ask in wave]

    assert beginnings(0) == beginnings(0)
    assert [one for one in beginnings(0) if one in beginnings(1)] == []


def test_no_conversation_keeps_its_place_in_all_turns() -> None:
    """The order changes between turns: in a fixed one, round-robin would return to each text by chance."""
    order = [ask for wave in waves(Load(), 0) for ask in wave if ask.part == CONVERSATIONS]
    places: dict[str, list[int]] = {}
    for at, ask in enumerate(order):
        places.setdefault(ask.session.name, []).append(at % Load().conversations)
    assert sum(len(set(of_one)) > 1 for of_one in places.values()) > Load().conversations / 2


def answer(part: str, cached_tokens: int, ttft_s: float, predicted_tokens: int | None = None) -> Answer:
    """Return an answer to a prompt of 1,000 tokens."""
    return Answer("id", "127.0.0.1:1", "text", 1000, cached_tokens, ttft_s, part, "chat 1", predicted_tokens)


RESULTS = {
    KVROUTE: [answer(CONVERSATIONS, 900, 0.1, 900), answer(BURST, 800, 0.1, 800), answer(NEW, 0, 0.3, 16)],
    ROUND_ROBIN: [answer(CONVERSATIONS, 0, 0.4), answer(BURST, 800, 0.2), answer(NEW, 0, 0.2)],
    LEAST_REQUESTS: [answer(CONVERSATIONS, 100, 0.5), answer(BURST, 0, 0.3), answer(NEW, 0, 0.4)],
}


def test_the_lines_compare_the_policies() -> None:
    """The last five lines compare the policies and name the parts in which kvroute gains nothing."""
    assert report(RESULTS).splitlines()[-5:] == [
        "first token:  167 ms in the mean; round-robin 267 ms; least requests 400 ms",
        "from cache:   57% of 3,000 prompt tokens; round-robin 27%; least requests 3%",
        "computed:     1,300 prompt tokens; round-robin 2,200, 1.7 times as many; "
        "least requests 2,900, 2.2 times as many",
        "prediction:   cached tokens predicted = delivered in 2 of 3 requests",
        "no gain:      new requests (300 ms against 200)",
    ]


def test_the_table_names_wrong_predictions() -> None:
    """The table has the cached tokens of each request, and wrong predictions in parentheses."""
    assert [" ".join(line.split()) for line in table(RESULTS).splitlines()] == [
        "cached tokens of prompts kvroute round-robin least requests",
        "chat 1 1000 1000 1000 900 800 0 (16) 0 800 0 100 0 0",
    ]


@pytest.mark.parametrize(("is_terminal", "no_color"), [(True, False), (True, True), (False, False)])
def test_colours_are_for_terminals(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, no_color: bool
) -> None:
    """Bars are coloured on a terminal only, and not if NO_COLOR is set."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(out, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    text = report(RESULTS)
    assert ("\x1b[" in text) == (is_terminal and not no_color)
    assert text.isascii()
