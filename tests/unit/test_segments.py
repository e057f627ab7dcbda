"""Encoding by segments equals encoding at once, and is not used where it might not."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from tokenization import TINY_DIRECTORY
from tokenization.segments import SegmentEncoder, segmentable

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WHOLE = Tokenizer.from_file(str(TINY_DIRECTORY / "tokenizer.json"))
ENCODER = SegmentEncoder(WHOLE, capacity_bytes=20_000)


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
    assert ENCODER.encode(text) == WHOLE.encode(text, add_special_tokens=False).ids


@given(st.lists(st.sampled_from(["<s>", "</s>", "<s", " ", "a", "b", "ab", "▁"]), max_size=12))
@settings(max_examples=200)
def test_a_prefix_space_is_put_before_every_segment(parts: list[str]) -> None:
    """A normalizer that adds to each piece does so for segments as for the whole text."""
    tokenizer = added(with_prefix_spaces(), *(AddedToken(text, normalized=False) for text in ("<s>", "</s>")))
    assert segmentable(tokenizer)
    text = "".join(parts)
    assert (
        SegmentEncoder(tokenizer, 10_000).encode(text) == tokenizer.encode(text, add_special_tokens=False).ids
    )


def test_a_known_segment_is_not_encoded_again() -> None:
    """What was encoded once comes from memory: a tokenizer that is taken away is not missed."""
    encoder = SegmentEncoder(WHOLE, capacity_bytes=20_000)
    ids = encoder.encode("<|im_start|>once upon a time")
    encoder._tokenizer = None
    assert encoder.encode("<|im_end|>once upon a time") == [2, *ids[1:]]


def test_memory_is_bounded() -> None:
    """Segments beyond the capacity push out the least recently used ones; one larger than it is not kept."""
    encoder = SegmentEncoder(WHOLE, capacity_bytes=4000)
    for number in range(200):
        encoder.encode(f"segment {number} " * 5)
    assert 0 < encoder._segments.currsize <= 4000
    held = dict(encoder._segments)
    encoder.encode("long " * 5000)
    assert dict(encoder._segments) == held


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
    assert not segmentable(added(with_prefix_spaces(), *tokens))


def test_a_tokenizer_that_depends_on_the_place_is_not_segmented() -> None:
    """A space that only the text's first piece gets cannot be put by segment."""
    tokenizer = added(with_prefix_spaces(), AddedToken("<s>", normalized=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    assert not segmentable(tokenizer)
