"""Encoder: texts have the ids of the tokenizers library, whichever library encodes them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from benchmarks.large_vocabulary import REGEXES
from tests.support.depth import examples
from tests.support.tokenization.tokenizers import SPECIAL, mistral_v3
from tokenization import TINY_DIRECTORY, TokenizerLoadError, UnsupportedPromptError
from tokenization.encoder import TextEncoder, hard_texts


def tiny() -> Tokenizer:
    """Return the packaged tokenizer."""
    return Tokenizer.from_file(str(TINY_DIRECTORY / "tokenizer.json"))


def with_prefix_spaces() -> Tokenizer:
    """Return a tokenizer like Llama 2's, which adds a space before every piece between special tokens."""
    vocabulary = {"<unk>": 0, "▁": 1, "a": 2, "b": 3, "▁a": 4, "▁b": 5, "ab": 6, "▁ab": 7}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁a", "b")], unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def of_family(family: str) -> Tokenizer:
    """Return the packaged vocabulary with a family's normalizer and pre-tokenizer."""
    tokenizer = tiny()
    if family == "gpt-2":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        return tokenizer
    if family == "qwen-2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(REGEXES[family]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer


def normalizing_anew() -> Tokenizer:
    """Return a tokenizer that the fast library rejects."""
    tokenizer = tiny()
    tokenizer.normalizer = normalizers.NFKC()
    return tokenizer


def added(tokenizer: Tokenizer, *tokens: AddedToken) -> Tokenizer:
    """Return the tokenizer with additional special tokens."""
    tokenizer.add_special_tokens(list(tokens))
    return tokenizer


MAKERS: dict[str, Callable[[], Tokenizer]] = {
    "mistral-v3": mistral_v3,
    "tekken": lambda: of_family("tekken"),
    "llama-3": lambda: of_family("llama-3"),
    "qwen-2": lambda: of_family("qwen-2"),
    "gpt-2": lambda: of_family("gpt-2"),
    "tiny": tiny,
    "refused": normalizing_anew,
}
# Characters that the regexes treat specially: letters of all cases and scripts, marks, digits, spaces.
ATOMS = (
    *("a", "A", "Ab", "don't", "'s", "'S", "b1", "1", "1234", "x_y", "é", "e\u0301", "\u0301", "ß", "ſ", "Ж"),
    *("\u0483", "世", "界。", "の", "か\u3099", "한", "\u1112\u1161\u11ab", "\u0b95\u0bcd", "😀", "\u200d"),
    *(" ", "  ", "\n", "\n\n", "\r\n", "\r", "\t", "\u00a0", "\u2003", "\u3000", "\x85", "\x0b", "\x1c"),
    *(".", "/", "//", "!?", "#", '"', "<s", "<|", "|>", *SPECIAL, "<|im_start|>", "<|im_end|>"),
)
texts = st.lists(st.sampled_from(ATOMS) | st.text(max_size=6), max_size=24).map("".join)


@pytest.mark.hypothesis
@pytest.mark.parametrize("name", sorted(MAKERS))
def test_ids_are_the_librarys(name: str) -> None:
    """Any text has the library's ids with any family's tokenizer."""
    tokenizer = MAKERS[name]()
    encoder = TextEncoder(tokenizer)

    @settings(max_examples=examples(100), deadline=None)
    @given(texts)
    def are_the_librarys(text: str) -> None:
        expected = tokenizer.encode(text, add_special_tokens=False).ids
        assert encoder.encode(text).tolist() == expected

    are_the_librarys()
    assert encoder.facts.is_fast == (name != "refused")
    assert encoder.facts.mismatches == 0


def test_a_load_compares_hard_texts() -> None:
    """At load both libraries encode 300 texts, which contain the tokenizer's special tokens."""
    assert TextEncoder(tiny()).facts.checks == 300
    texts = hard_texts(["<tool>"])
    assert texts == hard_texts(["<tool>"])
    assert any("<tool>" in text for text in texts)


@pytest.mark.parametrize("make", [tiny, normalizing_anew])
@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"])
def test_a_lone_surrogate_is_the_requests_fault(make: Callable[[], Tokenizer], text: str) -> None:
    """A text without a UTF-8 form raises UnsupportedPromptError and does not count as a mismatch."""
    encoder = TextEncoder(make())
    with pytest.raises(UnsupportedPromptError, match="lone surrogate"):
        encoder.encode(text)
    assert encoder.facts.mismatches == 0


@pytest.mark.parametrize(
    ("single", "expected"), [("<s> $A", ([8], [])), ("<s> $A </s>", ([8], [9])), ("$A </s>", ([], [9]))]
)
def test_post_processing_is_added_around_the_text(single: str, expected: tuple[list[int], list[int]]) -> None:
    """Tokens of the post-processor are added once before and after a text."""
    tokenizer = added(with_prefix_spaces(), *(AddedToken(text, normalized=False) for text in ("<s>", "</s>")))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[("<s>", 8), ("</s>", 9)]
    )
    encoder = TextEncoder(tokenizer)
    head, tail = expected
    assert encoder.affix_tokens == (len(head), len(tail))
    for text in ("ab", "", "<s>ab"):
        assert encoder.encode(text, add_special_tokens=True).tolist() == tokenizer.encode(text).ids
    assert encoder.encode("ab", add_special_tokens=True).tolist() == [*head, *encoder.encode("ab"), *tail]


def test_unsupported_post_processing_is_rejected() -> None:
    """A post-processor that repeats the text raises TokenizerLoadError."""
    tokenizer = added(with_prefix_spaces(), AddedToken("<s>", normalized=False))
    tokenizer.post_processor = processors.TemplateProcessing(single="$A <s> $A", special_tokens=[("<s>", 8)])
    with pytest.raises(TokenizerLoadError, match="post_processor"):
        TextEncoder(tokenizer)


def test_ids_are_writable() -> None:
    """Token ids are writable arrays, because kernels would be compiled separately for read-only ones."""
    for encoder in (TextEncoder(tiny()), TextEncoder(normalizing_anew())):
        assert encoder.encode("some words").flags.writeable
        assert encoder.encode("some words", add_special_tokens=True).flags.writeable


@pytest.mark.parametrize("make", [tiny, normalizing_anew])
def test_other_threads_run_while_a_text_is_encoded(make: Callable[[], Tokenizer]) -> None:
    """Encoding releases the GIL, so another thread runs many times during it."""
    encoder = TextEncoder(make())
    text = "".join(f"{number} words follow one another here. " for number in range(40_000))
    turns, rounds = 0, 0
    while turns < 5:
        rounds += 1
        assert rounds < 20, "no other thread ran while a long text was encoded"
        worker = threading.Thread(target=encoder.encode, args=(text,))
        worker.start()
        turns = 0
        # With the GIL held during the whole encoding there would be one turn before and one after it.
        while worker.is_alive():
            time.sleep(0.005)
            turns += 1
        worker.join()
        text += text


@pytest.mark.parametrize(
    "tokens",
    [
        [AddedToken("<s>", normalized=True)],
        [AddedToken("<s>", lstrip=True, normalized=False)],
        [AddedToken("<s>", normalized=False), AddedToken("x<s>", normalized=True)],
        [AddedToken("<a<", normalized=False), AddedToken("<b>", normalized=False)],
        [],
    ],
    ids=["normalized", "stripping", "within-another", "overlapping", "none"],
)
def test_a_tokenizer_with_overlapping_tokens_has_no_stable_prefixes(tokens: list[AddedToken]) -> None:
    """If special tokens may be matched differently in the whole text, no prefix is stable."""
    tokenizer = added(with_prefix_spaces(), *tokens)
    assert TextEncoder(tokenizer).stable_prefix("ab <s> x<s> <a<b> ab") == ""


def test_a_tokenizer_that_depends_on_position_has_no_stable_prefixes() -> None:
    """If only the first piece of a text gets a space, no prefix is stable."""
    tokenizer = added(with_prefix_spaces(), AddedToken("<s>", normalized=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    assert TextEncoder(tokenizer).stable_prefix("ab <s> ab") == ""


def test_a_stable_prefix_ends_with_a_token_that_cannot_become_longer() -> None:
    """A stable prefix does not end with a token that following text may turn into a longer one."""
    tokenizer = added(
        with_prefix_spaces(), *(AddedToken(text, normalized=False) for text in ("<s>", "<a>", "<a>b"))
    )
    encoder = TextEncoder(tokenizer)
    assert encoder.stable_prefix("ab<s>a<a>") == "ab<s>"
    assert encoder.stable_prefix("ab") == ""
