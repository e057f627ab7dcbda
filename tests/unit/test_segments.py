"""Encoding by segments equals encoding at once, and is not used where it might not."""

from __future__ import annotations

import re
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

from tokenization import TINY_DIRECTORY, TokenizerLoadError
from tokenization.segments import SegmentEncoder, segmentable
from tokenization.tries import trie_pattern

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WHOLE = Tokenizer.from_file(str(TINY_DIRECTORY / "tokenizer.json"))
ENCODER = SegmentEncoder(WHOLE, capacity_bytes=20_000, piece_chars=1)
# Longer than what is remembered as a beginning.
HISTORY = "".join(f"<|im_start|>user\nquestion {number} of many<|im_end|>\n" for number in range(80))


def ids(encoder: SegmentEncoder, text: str, *, special: bool = False) -> list[int]:
    """The ids that an encoder gives."""
    found: list[int] = encoder.begin(text, add_special_tokens=special).ids().tolist()
    return found


def whole(tokenizer: Tokenizer, text: str, *, special: bool = False) -> list[int]:
    """The ids that the library gives for the whole text."""
    found: list[int] = tokenizer.encode(text, add_special_tokens=special).ids
    return found


def with_prefix_spaces() -> Tokenizer:
    """A tokenizer as Llama 2's: every piece between special tokens gets a space in front."""
    vocabulary = {"<unk>": 0, "▁": 1, "a": 2, "b": 3, "▁a": 4, "▁b": 5, "ab": 6, "▁ab": 7}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁a", "b")], unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def added(tokenizer: Tokenizer, *tokens: AddedToken) -> Tokenizer:
    """The tokenizer with special tokens."""
    tokenizer.add_special_tokens(list(tokens))
    return tokenizer


@given(
    st.lists(
        st.sampled_from(SPECIAL) | st.sampled_from(["<|", "|>", "<|im_", " ", "\n\n"]) | st.text(max_size=20)
    )
)
@settings(max_examples=300)
def test_segments_join_to_the_whole_texts_ids(parts: list[str]) -> None:
    """Whatever stands between, before and behind special tokens, also their fragments, has the same ids."""
    text = "".join(parts)
    assert ids(ENCODER, text) == whole(WHOLE, text)


@given(st.lists(st.sampled_from(["<s>", "</s>", "<s", " ", "a", "b", "ab", "▁"]), max_size=12))
@settings(max_examples=200)
def test_a_prefix_space_is_put_before_every_segment(parts: list[str]) -> None:
    """A normalizer that adds to each piece does so for segments as for the whole text."""
    tokenizer = added(with_prefix_spaces(), *(AddedToken(text, normalized=False) for text in ("<s>", "</s>")))
    assert segmentable(tokenizer)
    text = "".join(parts)
    assert ids(SegmentEncoder(tokenizer, 10_000, piece_chars=1), text) == whole(tokenizer, text)


@given(st.text(alphabet="ab <>s/", max_size=30), st.integers(0, 60))
@settings(max_examples=200)
def test_a_text_that_goes_on_from_a_remembered_one_has_the_whole_texts_ids(tail: str, back: int) -> None:
    """A beginning is taken from memory only as far as the new text shares it, wherever they part."""
    encoder = SegmentEncoder(WHOLE, capacity_bytes=1 << 20)
    ids(encoder, HISTORY)
    text = HISTORY[: len(HISTORY) - back] + tail
    assert ids(encoder, text) == whole(WHOLE, text)


def test_the_next_turn_costs_only_its_new_text() -> None:
    """Of a conversation that goes on, what was encoded before is not encoded again."""
    encoder = SegmentEncoder(WHOLE, capacity_bytes=1 << 20)
    asked = HISTORY + "<|im_start|>assistant\n"
    assert encoder.begin(asked).missing_chars == len(asked)
    ids(encoder, asked)
    new = "an answer<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    missing = encoder.begin(asked + new).missing_chars
    # The header of the answer is encoded with it.
    assert 0 < missing <= len("<|im_start|>assistant\n") + len(new)
    assert encoder.begin(asked).missing_chars == 0


def test_an_edited_turn_keeps_what_stands_elsewhere() -> None:
    """Pieces are known by their text, so a change in the middle costs its own piece."""
    turns = [f"<|im_start|>user\n{'word ' * 100}{number}<|im_end|>\n" for number in range(20)]
    encoder = SegmentEncoder(WHOLE, capacity_bytes=1 << 20)
    ids(encoder, "".join(turns))
    turns[3] = turns[3].replace("word", "text", 1)
    assert encoder.begin("".join(turns)).missing_chars <= 2 * len(turns[3])


@pytest.mark.parametrize(
    ("single", "expected"), [("<s> $A", ([8], [])), ("<s> $A </s>", ([8], [9])), ("$A </s>", ([], [9]))]
)
def test_post_processing_is_put_around_the_segments(
    single: str, expected: tuple[list[int], list[int]]
) -> None:
    """What the tokenizer adds before and behind a text is added once, whether its pieces are known or not."""
    tokenizer = added(with_prefix_spaces(), *(AddedToken(text, normalized=False) for text in ("<s>", "</s>")))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[("<s>", 8), ("</s>", 9)]
    )
    encoder = SegmentEncoder(tokenizer, 10_000)
    head, tail = expected
    assert encoder.affix_tokens == (len(head), len(tail))
    for text in ("ab", "ab", "", "<s>ab"):
        assert ids(encoder, text, special=True) == whole(tokenizer, text, special=True)
    assert ids(encoder, "ab", special=True) == [*head, *whole(tokenizer, "ab"), *tail]


def test_post_processing_of_another_kind_is_refused() -> None:
    """A post-processor that repeats the text cannot be put around it, and is not taken for one that can."""
    tokenizer = added(with_prefix_spaces(), AddedToken("<s>", normalized=False))
    tokenizer.post_processor = processors.TemplateProcessing(single="$A <s> $A", special_tokens=[("<s>", 8)])
    with pytest.raises(TokenizerLoadError, match="post_processor"):
        SegmentEncoder(tokenizer, 10_000)


def test_memory_is_bounded() -> None:
    """Pieces and beginnings beyond the capacity push out the least recently used ones."""
    encoder = SegmentEncoder(WHOLE, capacity_bytes=60_000)
    for number in range(200):
        ids(encoder, f"<|im_start|>{number}" + "segment " * 400)
    assert 0 < encoder._memory.used_bytes <= 30_000
    assert 0 < encoder._prefixes.used_bytes <= 30_000
    held = len(encoder._memory)
    ids(SegmentEncoder(WHOLE, capacity_bytes=100), "long " * 5000)
    assert held == len(encoder._memory)


def test_other_threads_run_while_a_text_is_encoded() -> None:
    """The interpreter's lock is given back: another thread goes on many times within one encoding."""
    text = "".join(f"{number} words follow one another here. " for number in range(40_000))
    turns, rounds = 0, 0
    while turns < 5:
        rounds += 1
        assert rounds < 20, "no other thread ran while a long text was encoded"
        done = threading.Event()
        encoder = SegmentEncoder(WHOLE, capacity_bytes=0)

        def encode(text: str, encoder: SegmentEncoder, done: threading.Event) -> None:
            encoder.encode_pieces([text])
            done.set()

        worker = threading.Thread(target=encode, args=(text, encoder, done))
        worker.start()
        turns = 0
        # With the lock held during the whole encoding there would be a turn before and one behind it.
        while not done.is_set():
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
def test_a_doubtful_tokenizer_is_not_segmented(tokens: list[AddedToken]) -> None:
    """Where special tokens may be found otherwise in the whole text, it is encoded whole."""
    tokenizer = added(with_prefix_spaces(), *tokens)
    assert not segmentable(tokenizer)
    text = "ab <s> x<s> <a<b> ab"
    assert ids(SegmentEncoder(tokenizer, 10_000, piece_chars=1), text) == whole(tokenizer, text)


def test_a_tokenizer_that_depends_on_the_place_is_not_segmented() -> None:
    """A space that only the text's first piece gets cannot be put by segment."""
    tokenizer = added(with_prefix_spaces(), AddedToken("<s>", normalized=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    assert not segmentable(tokenizer)


def test_a_closed_prefix_ends_with_a_token_that_nothing_can_lengthen() -> None:
    """What follows a text may turn its last token into a longer one; such an end is not certain."""
    tokenizer = added(
        with_prefix_spaces(), *(AddedToken(text, normalized=False) for text in ("<s>", "<a>", "<a>b"))
    )
    encoder = SegmentEncoder(tokenizer, 10_000)
    assert encoder.closed_prefix("ab<s>a<a>") == "ab<s>"
    assert encoder.closed_prefix("ab") == ""


@given(st.lists(st.text(alphabet="ab.|", min_size=1, max_size=5), min_size=1, max_size=8), st.text("ab.|"))
def test_a_trie_finds_what_an_alternation_finds(words: list[str], text: str) -> None:
    """The pattern of common beginnings matches where, and as long as, the longest word does."""
    longest_first = "|".join(map(re.escape, sorted(words, key=len, reverse=True)))
    found = [match.span() for match in re.finditer(trie_pattern(words), text)]
    assert found == [match.span() for match in re.finditer(longest_first, text)]
