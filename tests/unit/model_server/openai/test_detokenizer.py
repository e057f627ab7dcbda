"""Detokenization of outputs, and stop strings, which are never part of the answer."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_server.openai.generation import StopStrings, TextAssembler
from model_server.openai.types import GenerationBody
from model_server.requests import EngineCoreOutput, FinishReason
from tokenization import TINY_DIRECTORY, PromptTokenizer


@cache
def tokenizer() -> PromptTokenizer:
    """Return the packaged tokenizer."""
    return PromptTokenizer.from_directory(TINY_DIRECTORY)


def output(ids: list[int], reason: FinishReason | None = None, cached_tokens: int = 0) -> EngineCoreOutput:
    """Return one output of the engine."""
    return EngineCoreOutput("r", tuple(ids), reason, cached_tokens)


def shown(assembler: TextAssembler, ids: list[int], reason: FinishReason = "length") -> str:
    """Return the text of ids that arrive one by one."""
    text = ""
    for at, token_id in enumerate(ids):
        delta = assembler.push(output([token_id], reason if at == len(ids) - 1 else None))
        text += delta.text
        if delta.finish_reason is not None:
            break
    return text


PIECES = st.lists(st.text("ab", max_size=12), max_size=8)
STOP = st.text("ab", min_size=1, max_size=4)


@given(pieces=PIECES, stops=st.lists(STOP, max_size=3))
def test_stop_strings_match_across_tokens(pieces: list[str], stops: list[str]) -> None:
    """However a text is split into tokens, the answer ends before the first complete stop string."""
    finder = StopStrings(tuple(stops))
    text = ""
    for piece in pieces:
        text += finder.push(piece)
        if finder.matched is not None:
            break
    else:
        text += finder.release()
    whole = "".join(pieces)
    found = [(whole.index(stop) + len(stop), whole.index(stop), stop) for stop in stops if stop in whole]
    _, start, stop = min(found, default=(0, len(whole), None))
    assert (text, finder.matched) == (whole[:start], stop)


@given(pieces=PIECES, stop=STOP)
def test_only_a_possible_match_is_withheld(pieces: list[str], stop: str) -> None:
    """The withheld text is always a prefix of the stop string."""
    finder = StopStrings((stop,))
    seen = text = ""
    for piece in pieces:
        seen += piece
        text += finder.push(piece)
        if finder.matched is not None:
            return
        assert stop.startswith(seen[len(text) :])


@given(st.text(max_size=30))
def test_any_text_is_decoded_unchanged(text: str) -> None:
    """The tokens of any text, decoded one by one, give the same text."""
    ids = tokenizer().encode(text)
    assert shown(TextAssembler(tokenizer()), ids) == tokenizer().decode(ids)


def test_a_stop_token_is_counted_but_not_part_of_the_text() -> None:
    """The stop token counts as a completion token, but its text is not part of the answer."""
    ids = tokenizer().encode("some words")
    assembler = TextAssembler(tokenizer(), GenerationBody(stop_token_ids=[ids[-1]]))
    delta = assembler.push(output(ids, "stop", cached_tokens=16))
    assert delta.text == tokenizer().decode(ids[:-1])
    assert (delta.finish_reason, delta.stop_reason) == ("stop", ids[-1])
    assert (assembler.completion_tokens, assembler.cached_tokens) == (len(ids), 16)


def test_end_of_sequence_has_no_stop_reason() -> None:
    """An end by the end-of-sequence token has no stop_reason."""
    eos = min(tokenizer().eos_token_ids)
    delta = TextAssembler(tokenizer()).push(output([eos], "stop"))
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("", "stop", None)


def test_a_stop_string_ends_before_the_rest_of_its_step() -> None:
    """Tokens after the match, in the same output or later, are neither part of the answer nor counted."""
    ids = tokenizer().encode("one two three four five")
    assembler = TextAssembler(tokenizer(), GenerationBody(stop=" three"))
    delta = assembler.push(output(ids))
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("one two", "stop", " three")
    assert assembler.finished
    assert assembler.completion_tokens < len(ids)


@pytest.mark.parametrize("reason", ["length", "stop"])
def test_withheld_text_is_returned_at_the_end(reason: FinishReason) -> None:
    """A prefix of a stop string that never completes is part of the answer."""
    ids = tokenizer().encode("one two thr")
    ends = [*ids, min(tokenizer().eos_token_ids)] if reason == "stop" else ids
    assert shown(TextAssembler(tokenizer(), GenerationBody(stop="three")), ends, reason) == "one two thr"


def test_min_tokens_hides_early_stop_strings() -> None:
    """A stop string within the first `min_tokens` tokens is ignored."""
    ids = tokenizer().encode("stop and stop again")
    first = len(tokenizer().encode("stop"))
    assert shown(TextAssembler(tokenizer(), GenerationBody(stop="stop")), ids) == ""
    later = TextAssembler(tokenizer(), GenerationBody(stop="stop", min_tokens=first))
    assert shown(later, ids) == "stop and "
