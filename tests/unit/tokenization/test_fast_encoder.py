"""Fast encoder: texts with different ids are detected, logged and left to the library."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np
import pytest

from tokenization.encoder import EncodingFacts, FastEncoder, TokenIds


def by_library(text: str) -> TokenIds:
    """Encode with one id per character, as the library of these tests."""
    return np.array([ord(char) for char in text], np.uint32)


class Fast:
    """Encoder with wrong results for some texts.

    Args:
        wrong: Texts with different ids.
        failing: Texts that raise.
    """

    def __init__(self, wrong: tuple[str, ...] = (), failing: tuple[str, ...] = ()) -> None:
        self.encoded: list[str] = []
        self._wrong = wrong
        self._failing = failing

    def encode_batch_flat(self, inputs: list[str]) -> tuple[bytes, bytes]:
        """Encode one text."""
        (text,) = inputs
        self.encoded.append(text)
        if text in self._failing:
            raise ValueError("cannot")
        return by_library(text[::-1] if text in self._wrong else text).tobytes(), b""


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until another thread fulfils the condition."""
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_one_prompt_of_many_is_compared() -> None:
    """Every n-th prompt is also encoded by the library, after its ids were returned."""
    asked: list[str] = []

    def library(text: str) -> TokenIds:
        asked.append(text)
        return by_library(text)

    encoder = FastEncoder(Fast(), library, check_every=4)
    for number in range(7):
        ids = encoder.encode(f"text {number}")
        assert ids is not None
        assert ids.tolist() == by_library(f"text {number}").tolist()
    wait_until(lambda: encoder.facts.checks == 1)
    assert asked == ["text 3"]
    assert encoder.facts == EncodingFacts(True, 1, 0)


def test_a_text_that_differs_is_left_to_the_library(caplog: pytest.LogCaptureFixture) -> None:
    """A text with different ids is left to the library, counted, and logged without its content."""
    encoder = FastEncoder(Fast(wrong=("secret words",)), by_library, check_every=1)
    with caplog.at_level(logging.WARNING):
        assert encoder.encode("secret words") is not None
        wait_until(lambda: encoder.facts.checks == 1)
    assert encoder.encode("secret words") is None
    assert encoder.encode("others") is not None
    assert (encoder.facts.is_fast, encoder.facts.mismatches) == (True, 1)
    assert "this text" in caplog.text
    assert "secret" not in caplog.text


def test_after_three_distinct_texts_the_tokenizer_is_left_to_the_library(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each mismatch is logged once; after the third the library encodes all texts."""
    wrong = ("ab", "cd", "ef", "gh")
    fast = Fast(wrong)
    encoder = FastEncoder(fast, by_library)
    with caplog.at_level(logging.WARNING):
        encoder.compare(["ab", "ab", "ab", "cd"])
        assert encoder.facts == EncodingFacts(True, 4, 2)
        encoder.compare(["ef", "gh"])
    assert encoder.facts == EncodingFacts(False, 6, 4)
    assert ["this text" in line for line in caplog.messages] == [True, True, False]
    fast.encoded.clear()
    assert encoder.encode("others") is None
    assert fast.encoded == []


def test_a_failure_counts_as_a_difference() -> None:
    """A text on which the fast encoder fails counts as a mismatch and is encoded by the library."""
    fast = Fast(failing=("ab",))
    encoder = FastEncoder(fast, by_library)
    assert encoder.encode("ab") is None
    assert encoder.encode("ab") is None
    assert fast.encoded == ["ab"]
    assert encoder.facts == EncodingFacts(True, 0, 1)


def test_very_long_prompts_are_not_compared() -> None:
    """Comparisons are limited to a budget of characters, so very long prompts are not compared."""
    asked: list[int] = []

    def library(text: str) -> TokenIds:
        asked.append(len(text))
        return by_library(text)

    encoder = FastEncoder(Fast(), library, check_every=1)
    assert encoder.encode("a" * (2 << 20)) is not None
    assert encoder.encode("a" * 1000) is not None
    wait_until(lambda: encoder.facts.checks == 1)
    assert asked == [1000]
