"""Incremental decoder: emitted pieces join to the text, for each kind of decoder."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders

from tests.support.depth import examples
from tests.support.tokenization.tokenizers import mistral_v3
from tokenization import TINY_DIRECTORY, IncrementalDecoder, PromptTokenizer

TINY = PromptTokenizer.from_directory(TINY_DIRECTORY)
SPECIALS = st.integers(0, 2)
BYTES = st.integers(3, 258)
IDS = st.integers(0, TINY.vocab_size - 1)


@cache
def sentencepiece() -> PromptTokenizer:
    """Return a tokenizer whose decoder drops the first space and joins single bytes."""
    tokenizer = Tokenizer.from_str(mistral_v3().to_str())
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return PromptTokenizer(tokenizer, None, frozenset())


def pieces(decoder: IncrementalDecoder, token_ids: list[int]) -> list[str]:
    """Return the pieces that are emitted for ids one by one."""
    return [*(decoder.push(token_id) for token_id in token_ids), decoder.flush()]


@pytest.mark.parametrize("skip", [True, False])
@given(token_ids=st.lists(st.one_of(SPECIALS, BYTES, IDS), max_size=60))
@settings(max_examples=examples(200), deadline=None)
def test_pieces_join_to_the_text(skip: bool, token_ids: list[int]) -> None:
    """Pieces of any ids of a byte-level tokenizer join to their text, also with broken characters."""
    whole = TINY.decode(token_ids, skip_special_tokens=skip)
    assert "".join(pieces(IncrementalDecoder(TINY, skip_special_tokens=skip), token_ids)) == whole


@given(token_ids=st.lists(st.one_of(SPECIALS, BYTES, IDS), max_size=30))
@settings(max_examples=examples(200), deadline=None)
def test_cached_texts_do_not_change_the_timing(token_ids: list[int]) -> None:
    """With cached texts of single ids each piece is emitted at the same id as without."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PromptTokenizer, "token_texts", lambda *_, **__: None)
        plain = IncrementalDecoder(TINY)
    assert pieces(IncrementalDecoder(TINY), token_ids) == pieces(plain, token_ids)


@given(text=st.text(max_size=30))
@settings(max_examples=examples(200), deadline=None)
def test_texts_that_depend_on_neighbours_are_not_cached(text: str) -> None:
    """If an id's text depends on its neighbours, texts are not cached and all spaces are kept."""
    tokenizer = sentencepiece()
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.token_texts() is None
    assert "".join(pieces(IncrementalDecoder(tokenizer), token_ids)) == tokenizer.decode(token_ids)


def test_special_tokens_within_a_character_do_not_break_it() -> None:
    """Skipped special tokens between the bytes of a character do not break it."""
    first, *rest = TINY.encode("¡", add_special_tokens=False)
    assert rest
    token_ids = [first, 0, 0, 0, 0, *rest]
    assert "".join(pieces(IncrementalDecoder(TINY), token_ids)) == "¡"


def test_a_part_of_a_character_has_no_text_of_its_own() -> None:
    """An id that is part of a character has no cached text."""
    texts = TINY.token_texts()
    assert texts is not None
    first, *_ = TINY.encode("é")
    assert TINY.decode([first]) == "�"
    assert texts[first] is None
    (word,) = TINY.encode(" the")
    assert texts[word] == " the"
