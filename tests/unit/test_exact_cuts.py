"""Long texts cut where it is exact: the parts' ids are the whole text's, for real tokenizers."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Encoding, Regex, Token, Tokenizer, normalizers, pre_tokenizers

from tests.unit.tokenizer_support import SPECIAL, mistral_v3, of_family, tekken
from tokenization import TINY_DIRECTORY
from tokenization.cuts import WordCuts, exact_cuts, exact_words, split_words
from tokenization.plain_words import PlainWords
from tokenization.segments import SegmentEncoder
from tokenization.word_kernels import fits
from tokenization.words import WordEncoder


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


def word_cuts(tokenizer: Tokenizer) -> WordCuts:
    """How the texts of a tokenizer that is surely cut fall into words."""
    cuts = exact_words(tokenizer)
    assert cuts is not None
    return cuts


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
    """Between two special tokens a short text is encoded alone, a longer one by pieces: ids of the whole."""
    tokenizer = TOKENIZERS[name]()
    special = "<|im_start|>" if name == "tiny" else "[INST]"
    encoder = SegmentEncoder(tokenizer, 1 << 22)
    assert encoder.closing_ids(f" {special}") is None

    @given(texts, texts, texts)
    @settings(max_examples=100, deadline=None)
    def parts_join(beginning: str, text: str, closing: str) -> None:
        text, closing = special + text, special + closing
        known = encoder.begin(beginning).ids()
        whole = tokenizer.encode(beginning + text + closing, add_special_tokens=False).ids
        assert encoder.begin_behind(known, text + closing).ids().tolist() == whole
        closing_ids = encoder.closing_ids(closing)
        assert closing_ids is not None
        ids = encoder.ids_between(known, text, closing_ids).tolist()
        assert ids == whole
        middle = tokenizer.encode(beginning + text, add_special_tokens=False).ids
        assert ids[: len(ids) - len(closing_ids)] == middle
        assert encoder.ids_between(known, "", closing_ids).tolist() == [*known, *closing_ids]

    parts_join()


@pytest.mark.parametrize("name", CUT)
def test_words_have_the_whole_texts_ids(name: str) -> None:
    """Word by word a text has the ids of the whole, also while its words are forgotten again."""
    tokenizer = TOKENIZERS[name]()
    cuts = word_cuts(tokenizer)
    large, tiny_one = (WordEncoder(tokenizer, cuts, (), size) for size in (1 << 22, 1 << 10))

    @given(texts)
    @settings(max_examples=300, deadline=None)
    def words_join(text: str) -> None:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert large.encode(text).tolist() == ids
        assert tiny_one.encode(text).tolist() == ids

    words_join()


@pytest.mark.parametrize("name", ["llama-3", "qwen-2", "gpt-2", "tiny"])
def test_words_end_at_special_tokens(name: str) -> None:
    """The longest special token at a place is a word, whatever stands beside it."""
    tokenizer = TOKENIZERS[name]()
    cuts = word_cuts(tokenizer)
    added = ["<|im_end|>", "<|im_", "世", "[INST]"]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in added])
    specials = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    encoder = WordEncoder(tokenizer, cuts, specials, 1 << 22)

    @given(st.lists(texts | st.sampled_from(specials)).map("".join))
    @settings(max_examples=200, deadline=None)
    def words_join(text: str) -> None:
        assert encoder.encode(text).tolist() == tokenizer.encode(text, add_special_tokens=False).ids

    words_join()


# The rule that WordCuts states, once more as a regex: white space, a word's end, what does not end one.
_SPACE, _PUNCTUATION = r"[ \t\r\n]", r"!-/:-@\[-`{-~"
_LETTER = "0-9A-Za-z\u0410-\u044f\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
_NO_CUT = f"(?<![\n{_LETTER}{_PUNCTUATION}])(?=.)|(?<=[{_PUNCTUATION}])(?=[\\r\\n])"


@pytest.mark.parametrize("cuts", list(WordCuts))
def test_words_end_where_the_rule_says(cuts: WordCuts) -> None:
    """The compiled splitting of bytes is the stated rule's, for any characters."""
    lines = [rf"{_SPACE}*\n(?=[{_LETTER}])"] if cuts is WordCuts.LINES else []
    part = "|".join([*lines, rf"{_SPACE}*+[^ \t\r\n]++", f"{_SPACE}++"])
    rule = re.compile(f"(?:{part})(?:(?:{_NO_CUT})(?:{part}))*+", re.DOTALL)

    @given(texts | st.text())
    @settings(max_examples=1000, deadline=None)
    def words_are_the_rules(text: str) -> None:
        assert split_words(text, cuts) == rule.findall(text)

    words_are_the_rules()


@pytest.mark.parametrize("name", CUT)
def test_running_text_falls_into_words(name: str) -> None:
    """Each word is a part of its own, with the space in front; else nothing would be known again."""
    text = "One line, with 12 (or 13) numbers.\nAnd another."
    assert len(split_words(text, word_cuts(TOKENIZERS[name]()))) >= 8


@pytest.mark.parametrize("name", CUT)
def test_plain_words_have_the_librarys_ids(name: str) -> None:
    """Letters and the punctuation behind them are the same ids to the model alone and to the library."""
    tokenizer = TOKENIZERS[name]()
    plain = PlainWords.of(tokenizer)
    assert plain is not None

    @given(st.from_regex(r" ?[A-Z]?[a-z]+[!-/:-@\[-`{-~]*", fullmatch=True))
    @settings(max_examples=500, deadline=None)
    def ids_are_the_librarys(word: str) -> None:
        assert plain.ids(word) == tokenizer.encode(word, add_special_tokens=False).ids

    ids_are_the_librarys()


@pytest.mark.parametrize(
    "word",
    ["", " ", "two words", "don't", "WordS", "x1", "1", "-a", "a b", "a\n", "\na", "é", "aé", "."],
)
def test_no_other_word_is_plain(word: str) -> None:
    """Where a family's regex may cut otherwise, or another character composes, the library is asked."""
    plain = PlainWords.of(tiny())
    assert plain is not None
    assert plain.ids(word) is None


@pytest.mark.parametrize("content", ["word", " a", "Re", "...", "a)", "o", " "])
def test_an_added_token_in_plain_words_leaves_them_to_the_library(content: str) -> None:
    """The library finds added tokens first, wherever they stand; those in no plain word do not matter."""
    assert PlainWords.of(with_token(AddedToken(content, normalized=False))) is None
    assert PlainWords.of(with_token(AddedToken(f"<x{content}x>", normalized=False))) is not None


def test_known_words_need_no_library() -> None:
    """What was seen is not encoded again in another text; what was forgotten is."""
    tokenizer = Counting(tiny())
    encoder = WordEncoder(tokenizer, WordCuts.LINES, (), 1 << 20)  # type: ignore[arg-type]
    tokenizer.seen.clear()
    encoder.encode("one two three " * 3)
    assert sorted(tokenizer.seen) == [" ", " one", " three", " two", "one"]
    tokenizer.seen.clear()
    assert encoder.encode("one three two").tolist() == tiny().encode("one three two").ids
    assert tokenizer.seen == []


def test_a_word_is_known_wherever_it_stands() -> None:
    """In front of a special token and behind a line's end it is the word that stands elsewhere."""
    tokenizer, text = Counting(tiny()), "Two lines\nand<|im_end|> lines\nTwo"
    encoder = WordEncoder(tokenizer, WordCuts.LINES, ["<|im_end|>"], 1 << 20)  # type: ignore[arg-type]
    tokenizer.seen.clear()
    assert encoder.encode(text).tolist() == tiny().encode(text, add_special_tokens=False).ids
    assert sorted(tokenizer.seen) == ["\n", " lines", "<|im_end|>", "Two", "and"]


def test_words_that_are_asked_for_stay() -> None:
    """Other words, however many, take no more room than they may, nor the place of one that is in use."""
    tokenizer = Counting(tiny())
    encoder = WordEncoder(tokenizer, WordCuts.LINES, (), 64 << 10)  # type: ignore[arg-type]
    asked = 0
    for number in range(2000):
        tokenizer.seen.clear()
        encoder.encode(f" often w{number}x w{number}y {'long' * 20}{number}")
        asked += " often" in tokenizer.seen
    assert encoder.used_bytes <= 64 << 10
    assert asked < 20


def test_a_word_too_long_for_any_line_is_never_remembered() -> None:
    """It is encoded each time, and rightly; a word that just fits is remembered."""
    for length in (*range(40, 64), *range(90, 250, 7)):
        tokenizer, text = Counting(tiny()), " " + "q" * (length - 1)
        encoder = WordEncoder(tokenizer, WordCuts.LINES, (), 1 << 20)  # type: ignore[arg-type]
        ids = tiny().encode(text, add_special_tokens=False).ids
        tokenizer.seen.clear()
        assert encoder.encode(text).tolist() == encoder.encode(text).tolist() == ids
        assert len(tokenizer.seen) == (1 if fits(length, len(ids)) else 2)


def test_long_texts_teach_their_words_bit_by_bit() -> None:
    """Most of a long text that is not known is the library's; its first pieces teach, until all is known."""
    encoder = SegmentEncoder(tiny(), 1 << 22)
    assert encoder._words is not None
    counting = encoder._words._tokenizer = Counting(tiny())
    lines = [" ".join(f"word{number % 3000}" for number in range(at, at + 500)) for at in range(0, 9000, 500)]
    shares = []
    for round_ in range(20):
        # Its words are known by and by, its pieces never.
        text = f"{round_} " + " ".join(f"{line} {round_}" for line in lines)
        counting.seen.clear()
        assert encoder.begin(text).ids().tolist() == tiny().encode(text, add_special_tokens=False).ids
        shares.append(sum(map(len, counting.seen)) / len(text))
    assert 0 < shares[0] < 0.5
    assert shares[-1] < 0.01


class Counting:
    """A tokenizer that keeps what it was asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.seen: list[str] = []

    @property
    def model(self) -> Counting:
        """Counts, too."""
        return self

    def tokenize(self, piece: str) -> list[Token]:
        """See the library's model's."""
        self.seen.append(piece.replace("\u0120", " "))
        tokens: list[Token] = self._tokenizer.model.tokenize(piece)
        return tokens

    def get_added_tokens_decoder(self) -> dict[int, AddedToken]:
        """See the library's."""
        added: dict[int, AddedToken] = self._tokenizer.get_added_tokens_decoder()
        return added

    def encode(self, text: str, **options: bool) -> Encoding:
        """See the library's."""
        self.seen.append(text)
        return self._tokenizer.encode(text, **options)

    def encode_batch_fast(self, texts: list[str], **options: bool) -> list[Encoding]:
        """See the library's."""
        self.seen += texts
        encodings: list[Encoding] = self._tokenizer.encode_batch_fast(texts, **options)
        return encodings


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
