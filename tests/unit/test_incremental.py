"""tokenization.incremental: what is emitted piece by piece is the text, for each kind of decoder."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders

from tests.support.depth import examples
from tests.unit.tokenizer_support import mistral_v3
from tokenization import TINY_DIRECTORY, IncrementalDecoder, PromptTokenizer

TINY = PromptTokenizer.from_directory(TINY_DIRECTORY)
SPECIALS = st.integers(0, 2)
BYTES = st.integers(3, 258)
IDS = st.integers(0, TINY.vocab_size - 1)


@cache
def sentencepiece() -> PromptTokenizer:
    """A tokenizer whose decoder drops the first space and joins single bytes."""
    tokenizer = Tokenizer.from_str(mistral_v3().to_str())
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return PromptTokenizer(tokenizer, None, frozenset())


def pieces(decoder: IncrementalDecoder, token_ids: list[int]) -> list[str]:
    """What it emits for ids that come one by one."""
    return [*(decoder.push(token_id) for token_id in token_ids), decoder.flush()]


@pytest.mark.parametrize("skip", [True, False])
@given(token_ids=st.lists(st.one_of(SPECIALS, BYTES, IDS), max_size=60))
@settings(max_examples=examples(200), deadline=None)
def test_remembered_texts_change_nothing(skip: bool, token_ids: list[int]) -> None:
    """Any ids of a byte-level tokenizer, broken characters and special ones too, join to their text."""
    whole = TINY.decode(token_ids, skip_special_tokens=skip)
    assert "".join(pieces(IncrementalDecoder(TINY, skip_special_tokens=skip), token_ids)) == whole


@given(token_ids=st.lists(st.one_of(SPECIALS, BYTES, IDS), max_size=30))
@settings(max_examples=examples(200), deadline=None)
def test_each_id_is_shown_as_soon_as_without_them(token_ids: list[int]) -> None:
    """Remembering texts neither holds text back nor emits it earlier."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PromptTokenizer, "own_texts", lambda *_, **__: None)
        plain = IncrementalDecoder(TINY)
    assert pieces(IncrementalDecoder(TINY), token_ids) == pieces(plain, token_ids)


@given(text=st.text(max_size=30))
@settings(max_examples=examples(200), deadline=None)
def test_a_decoder_that_looks_around_is_asked_each_time(text: str) -> None:
    """Where an id's text depends on its neighbours none is remembered, and the spaces are all there."""
    tokenizer = sentencepiece()
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.own_texts() is None
    assert "".join(pieces(IncrementalDecoder(tokenizer), token_ids)) == tokenizer.decode(token_ids)


def test_special_tokens_within_a_character_do_not_break_it() -> None:
    """Tokens that are not shown separate nothing, however many stand between a character's bytes."""
    first, *rest = TINY.encode("¡", add_special_tokens=False)
    assert rest
    token_ids = [first, 0, 0, 0, 0, *rest]
    assert "".join(pieces(IncrementalDecoder(TINY), token_ids)) == "¡"


def test_a_part_of_a_character_has_no_text_of_its_own() -> None:
    """Only whole characters are remembered."""
    texts = TINY.own_texts()
    assert texts is not None
    first, *_ = TINY.encode("é")
    assert TINY.decode([first]) == "�"
    assert texts[first] is None
    (word,) = TINY.encode(" the")
    assert texts[word] == " the"
