"""Long texts cut where it is exact: the parts' ids are the whole text's, for real tokenizers."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Encoding, Regex, Tokenizer, normalizers, pre_tokenizers

from tests.unit.tokenizer_support import SPECIAL, mistral_v3, of_family, tekken
from tokenization import TINY_DIRECTORY
from tokenization.cuts import exact_cuts, exact_words
from tokenization.segments import SegmentEncoder
from tokenization.words import WORDS_CHARS_MAX, WordEncoder


def tiny() -> Tokenizer:
    """The packaged tokenizer."""
    return Tokenizer.from_file(str(TINY_DIRECTORY / "tokenizer.json"))


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "tekken-2409": tekken,
    "tekken-2407": lambda: tekken("tekken_240718.json"),
    "mistral-v3": mistral_v3,
    "llama-3": lambda: of_family("llama-3"),
    "qwen-2": lambda: of_family("qwen-2"),
    "gpt-2": lambda: of_family("gpt-2"),
    "tiny": tiny,
}
CUT = sorted(set(TOKENIZERS) - {"mistral-v3"})
# What the regexes treat apart: letters of every case and script, marks, digits, contractions, white space.
ATOMS = (
    *("a", "A", "Ab", "don't", "'s", "'S", "b1", "1", "1234", "x_y", "é", "e\u0301", "\u0301", "ß", "ſ", "Ж"),
    *(
        "\u0483",
        "世",
        "界。",
        "の",
        "が",
        "か\u3099",
        "한",
        "\u1112\u1161\u11ab",
        "\u0b95\u0bcd",
        "😀",
        "\u200d",
    ),
    *(" ", "  ", "\n", "\n\n", "\r\n", "\r", "\t", "\u00a0", "\u2003", "\u3000", "\x85", "\x0b", "\x1c"),
    *(".", "/", "//", "!?", "#", '"', "<s", *SPECIAL),
)
texts = st.lists(st.sampled_from(ATOMS) | st.text(max_size=6), max_size=24).map("".join)


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_parts_have_the_whole_texts_ids(name: str) -> None:
    """However a text is mixed, cutting it at every place that counts as exact changes no id."""
    tokenizer = TOKENIZERS[name]()
    encoder = SegmentEncoder(tokenizer, 1 << 22, piece_chars=1, chunk_chars=1)

    @given(texts)
    @settings(max_examples=300, deadline=None)
    def parts_join(text: str) -> None:
        ids = encoder.begin(text).ids().tolist()
        assert ids == tokenizer.encode(text, add_special_tokens=False).ids

    parts_join()


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_what_goes_on_behind_a_known_beginning_has_the_whole_texts_ids(name: str) -> None:
    """Between two special tokens a text is encoded as one piece, with the ids of the whole."""
    tokenizer = TOKENIZERS[name]()
    special = "<|im_start|>" if name == "tiny" else "[INST]"
    encoder = SegmentEncoder(tokenizer, 1 << 22)
    assert encoder.is_cut_before(special)
    assert not encoder.is_cut_before(f" {special}")

    @given(texts, texts, texts)
    @settings(max_examples=100, deadline=None)
    def parts_join(beginning: str, text: str, closing: str) -> None:
        text, closing = special + text, special + closing
        known = encoder.begin(beginning).ids()
        encoding = encoder.begin_behind(known, text, closing)
        whole = tokenizer.encode(beginning + text + closing, add_special_tokens=False).ids
        assert encoding.ids().tolist() == whole
        found = encoding.beginning(len(text))
        assert found is not None
        chars, ids, _ = found
        assert chars == len(text)
        assert ids.tolist() == tokenizer.encode(beginning + text, add_special_tokens=False).ids

    parts_join()


@pytest.mark.parametrize("name", CUT)
def test_words_have_the_whole_texts_ids(name: str) -> None:
    """Word by word a text has the ids of the whole, also while its words are forgotten again."""
    tokenizer = TOKENIZERS[name]()
    pattern = exact_words(tokenizer)
    assert pattern is not None
    large, tiny_one = (WordEncoder(tokenizer, pattern, None, size) for size in (1 << 22, 1 << 12))

    @given(texts)
    @settings(max_examples=300, deadline=None)
    def words_join(text: str) -> None:
        assert "".join(pattern.findall(text)) == text
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert large.encode(text).tolist() == ids
        assert tiny_one.encode(text).tolist() == ids

    words_join()


@pytest.mark.parametrize("name", CUT)
def test_running_text_falls_into_words(name: str) -> None:
    """Each word is a part of its own, with the space in front; else nothing would be known again."""
    pattern = exact_words(TOKENIZERS[name]())
    assert pattern is not None
    text = "One line, with 12 (or 13) numbers.\nAnd another."
    assert len(pattern.findall(text)) >= 8


def test_known_words_need_no_library() -> None:
    """What was seen is not encoded again in another text; what was forgotten is."""
    tokenizer = Counting(tiny())
    pattern = exact_words(tiny())
    assert pattern is not None
    encoder = WordEncoder(tokenizer, pattern, None, 1 << 20)  # type: ignore[arg-type]
    encoder.encode("one two three " * 3)
    assert sorted(tokenizer.seen) == [" ", " one", " three", " two", "one"]
    tokenizer.seen.clear()
    assert encoder.encode("one three two").tolist() == tiny().encode("one three two").ids
    assert tokenizer.seen == []


def test_a_word_is_known_wherever_it_stands() -> None:
    """In front of a special token and behind a line's end it is the word that stands elsewhere."""
    tokenizer, text = Counting(tiny()), "Two lines\nand<|im_end|> lines\nTwo"
    pattern = exact_words(tiny())
    assert pattern is not None
    encoder = WordEncoder(tokenizer, pattern, re.compile(r"(<\|im_end\|>)"), 1 << 20)  # type: ignore[arg-type]
    assert encoder.encode(text).tolist() == tiny().encode(text, add_special_tokens=False).ids
    assert sorted(tokenizer.seen) == ["\n", " lines", "<|im_end|>", "Two", "and"]


def test_words_take_no_more_room_than_they_may() -> None:
    """However many different words come, only so many are remembered, and long ones never."""
    tokenizer = tiny()
    pattern = exact_words(tokenizer)
    assert pattern is not None
    encoder = WordEncoder(tokenizer, pattern, None, 64 << 10)
    for number in range(50):
        encoder.encode(" ".join(f"w{number}x{at}" for at in range(50)) + " " + "long" * 20)
    kept = encoder._young | encoder._old
    assert 0 < len(kept) <= (64 << 10) // 256
    assert max(map(len, kept)) < 80


def test_long_texts_are_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond some thousand characters the library encodes, which gives up the GIL meanwhile."""
    encoder = SegmentEncoder(tiny(), 1 << 22)

    def refuse(_self: WordEncoder, _text: str) -> None:
        raise AssertionError

    monkeypatch.setattr(WordEncoder, "encode", refuse)
    text = " ".join(f"word{number}" for number in range(WORDS_CHARS_MAX // 4))
    assert encoder.begin(text).ids().tolist() == tiny().encode(text, add_special_tokens=False).ids


class Counting:
    """A tokenizer that keeps what it was asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.seen: list[str] = []

    def encode(self, text: str, **options: bool) -> Encoding:
        """See the library's."""
        self.seen.append(text)
        return self._tokenizer.encode(text, **options)


@pytest.mark.parametrize("name", CUT)
def test_a_long_document_is_cut(name: str) -> None:
    """In running text there is a place to cut near every length; without it this file would prove nothing."""
    encoder = SegmentEncoder(TOKENIZERS[name](), 1 << 22)
    text = "One line of some prose, with 12 numbers.\nAnd another one;\n" * 200
    pieces = encoder._pieces(text)
    assert "".join(pieces) == text
    assert max(map(len, pieces)) < 1100
    encoder.begin(text).ids()
    assert encoder.begin(text + "It has grown.").missing_chars < 1100


def test_han_text_is_cut_behind_its_lines() -> None:
    """A script without spaces has line feeds, at least for the families that treat them apart."""
    text = "这里有一些没有空格的文字。\n" * 300
    assert len(SegmentEncoder(of_family("qwen-2"), 1 << 22)._pieces(text)) > 2
    assert len(SegmentEncoder(of_family("gpt-2"), 1 << 22)._pieces(text)) == 1


def split_by(regex: str) -> Tokenizer:
    """The packaged tokenizer with another regex."""
    tokenizer = tiny()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(regex), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer


def with_token(token: AddedToken) -> Tokenizer:
    """The packaged tokenizer with one more added token."""
    tokenizer = tiny()
    tokenizer.add_tokens([token])
    return tokenizer


def changed(part: str, value: object) -> Tokenizer:
    """The packaged tokenizer with another normalizer or pre-tokenizer."""
    tokenizer = tiny()
    setattr(tokenizer, part, value)
    return tokenizer


def test_a_token_with_punctuation_and_space_leaves_words_whole() -> None:
    """An added token that only the cuts between words might go through does without them."""
    tokenizer = with_token(AddedToken("<| |>", normalized=False))
    assert exact_cuts(tokenizer) is not None
    assert exact_words(tokenizer) is None
    assert exact_words(tiny()) is not None


@pytest.mark.parametrize(
    "tokenizer",
    [
        split_by(r"\w+ ?|\s+|\W"),
        with_token(AddedToken("two words", normalized=False)),
        with_token(AddedToken("word", lstrip=True)),
        with_token(AddedToken("word", single_word=True)),
        changed("normalizer", normalizers.Lowercase()),
        changed("normalizer", normalizers.NFKC()),
        changed("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        changed("pre_tokenizer", pre_tokenizers.Whitespace()),
    ],
    ids=["regex", "words", "stripping", "single", "lower", "nfkc", "prefix-space", "other-kind"],
)
def test_a_doubtful_tokenizer_is_not_cut(tokenizer: Tokenizer) -> None:
    """All but the known families, and any added token that a cut might go through, leaves texts whole."""
    assert exact_cuts(tokenizer) is None
    assert exact_words(tokenizer) is None
