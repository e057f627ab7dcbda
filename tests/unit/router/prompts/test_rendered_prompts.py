"""Responses of render endpoints: those of vLLM, and those of a broken or hostile server."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.keys import BlockHasher, MultimodalItem
from router.prompts.remote_tokenizers import read_rendered
from router.prompts.request import MEDIA, PromptTokens, RequestKind
from tests.support.indexer.decoding import decode_batch
from tests.support.indexer.views import OnePod
from tests.support.tokenization.media import BLOCK_TOKENS, CASES, agreeing_blocks, answer, payloads

IDS = [1, 2, 3, 4, 5, 5, 6, 7]
ERRORS = (ValueError, OverflowError, RecursionError)


def read(token_ids: object = IDS, **features: object) -> PromptTokens:
    """Return the tokens read from a rendered chat with these features."""
    return read_rendered(
        RequestKind.CHAT, json.dumps({"token_ids": token_ids, "features": features}).encode()
    )


def place(offset: object, length: object) -> dict[str, object]:
    """Return the placeholder range of an item."""
    return {"offset": offset, "length": length}


def lists(tokens: PromptTokens) -> list[list[int]]:
    """Return the prompts as lists."""
    return [prompt.tolist() for prompt in tokens.prompts]


@pytest.mark.parametrize("kind", [RequestKind.CHAT, RequestKind.RESPONSES])
@pytest.mark.parametrize("name", CASES)
def test_vllms_responses_are_read_completely(name: str, kind: RequestKind) -> None:
    """All token ids are known, and all media items with hash and range, in order."""
    rendered = CASES[name]["rendered"]
    tokens = read_rendered(kind, answer(name))
    assert lists(tokens) == [rendered["token_ids"]]
    assert (tokens.total, tokens.degraded, tokens.partial) == (len(rendered["token_ids"]), None, None)
    features = rendered["features"] or {"mm_hashes": {}, "mm_placeholders": {}}
    items = {
        MultimodalItem(identifier, at["offset"], at["length"])
        for modality, hashes in features["mm_hashes"].items()
        for identifier, at in zip(hashes, features["mm_placeholders"][modality], strict=True)
    }
    read_items = [item for media in tokens.media for item in media]
    assert (set(read_items), len(read_items)) == (items, len(items))
    assert read_items == sorted(read_items, key=lambda item: item.offset)


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("told", CASES)
def test_a_prompt_matches_as_far_as_vllms_hashes_agree(told: str, flat: bool) -> None:
    """Every prompt matches exactly the blocks of a pod that vLLM would reuse.

    Blocks of an image and behind it match, also when stored step by step; blocks of another image, or of the
    same one at another offset, do not, although their token ids are equal.
    """
    pod = OnePod(block_tokens=BLOCK_TOKENS, flat=flat)
    for payload in payloads(told):
        assert not pod.apply(*decode_batch(payload, 1 << 20).batch.events).skipped
    for name, case in CASES.items():
        tokens = read_rendered(RequestKind.CHAT, answer(name))
        (extras,) = tokens.extras(BLOCK_TOKENS)
        keys = pod.keys(case["rendered"]["token_ids"], case["lora_name"], case["cache_salt"], extras)
        assert pod.match(keys).cached_blocks == agreeing_blocks(name, told), name


def test_the_vectors_distinguish_images() -> None:
    """The vectors contain prompts that differ only in an image, and one reported in steps."""
    one, another = CASES["one_image"]["rendered"], CASES["another_image"]["rendered"]
    assert one["token_ids"] == another["token_ids"]
    assert agreeing_blocks("one_image", "another_image") == 1
    assert agreeing_blocks("one_image", "in_steps") == len(one["token_ids"]) // BLOCK_TOKENS


def test_without_hashes_only_the_prefix_is_known() -> None:
    """Without hashes, the known prefix ends at the first placeholder, which all images share."""
    places = {"image": [place(4, 2), place(2, 1)]}
    for features in ({"mm_placeholders": places}, {"mm_placeholders": places, "mm_hashes": None}):
        tokens = read(**features)
        assert (lists(tokens), tokens.total, tokens.partial, tokens.media) == ([[1, 2]], 8, MEDIA, ())


def test_overlapping_items_end_the_known_prefix() -> None:
    """Overlapping items end the known prefix, because events do not name both in every block."""
    places = {"video": [place(3, 4)], "audio": [place(4, 2)]}
    tokens = read(mm_hashes={"video": ["v"], "audio": ["a"]}, mm_placeholders=places)
    assert (lists(tokens), tokens.total, tokens.partial, tokens.media) == ([[1, 2, 3]], 8, MEDIA, ())


def test_each_of_several_prompts_has_its_own_items() -> None:
    """Prompts with text only, with a known image and with an unknown image are treated independently."""
    image = {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": [place(0, 2)]}}
    unhashed = {"mm_placeholders": {"image": [place(1, 2)]}}
    body = [{"token_ids": IDS, "features": features} for features in (None, image, unhashed)]
    tokens = read_rendered(RequestKind.COMPLETIONS, json.dumps(body).encode())
    assert lists(tokens) == [IDS, IDS, IDS[:1]]
    assert (tokens.media, tokens.partial) == (((), (MultimodalItem("a", 0, 2),), ()), MEDIA)
    assert [list(extras) for extras in tokens.extras(4)][0::2] == [[], []]
    assert tokens.extras(4)[1][0]


@pytest.mark.parametrize(
    "features",
    [
        {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": [place(7, 2)]}},
        {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": [place(9, 1)]}},
        {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": [place(-1, 2)]}},
        {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": [place(1, 0)]}},
        {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": [place(1, 1 << 62)]}},
        {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": [place(1 << 70, 1)]}},
        {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": [place(1, None)]}},
        {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": [{"offset": 1}]}},
        {"mm_hashes": {"image": ["a", "b"]}, "mm_placeholders": {"image": [place(1, 1)]}},
        {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"audio": [place(1, 1)]}},
        {"mm_hashes": {"image": ["a"]}, "mm_placeholders": None},
        {"mm_hashes": {}, "mm_placeholders": {"image": [place(1, 1)]}},
        {"mm_hashes": {"image": [None]}, "mm_placeholders": {"image": [place(1, 1)]}},
        {"mm_hashes": {"image": "a"}, "mm_placeholders": {"image": [place(1, 1)]}},
        {"mm_placeholders": {"image": [place(7, 2)]}},
        {"mm_placeholders": [place(1, 1)]},
    ],
)
def test_inconsistent_items_are_rejected(features: dict[str, Any]) -> None:
    """A response with inconsistent media items is rejected as a whole."""
    with pytest.raises(ERRORS):
        read(**features)


NUMBERS = st.integers(-2, 12) | st.integers()
PLACES = st.lists(st.fixed_dictionaries({"offset": NUMBERS, "length": NUMBERS}), max_size=4)
MODALITIES = st.sampled_from(["image", "audio", "video"])
FEATURES = st.fixed_dictionaries(
    {"mm_placeholders": st.none() | st.dictionaries(MODALITIES, PLACES, max_size=3)},
    optional={
        "mm_hashes": st.none() | st.dictionaries(MODALITIES, st.lists(st.text(max_size=4), max_size=4))
    },
)


@st.composite
def features_of_equal_counts(draw: st.DrawFn) -> dict[str, Any]:
    """Draw equal numbers of hashes and ranges, so that only the ranges can be inconsistent."""
    places = draw(st.dictionaries(MODALITIES, PLACES, max_size=3))
    hashes = {name: [draw(st.text(max_size=4)) for _ in items] for name, items in places.items()}
    return {"mm_hashes": hashes, "mm_placeholders": places}


@given(st.lists(st.integers(0, 9), max_size=12), st.none() | FEATURES | features_of_equal_counts())
@settings(deadline=None)
def test_any_items_are_consistent_or_rejected(token_ids: list[int], features: dict[str, Any] | None) -> None:
    """Accepted items lie ordered and disjoint within their prompt and give keys; cut prompts are partial."""
    body = json.dumps({"token_ids": token_ids, "features": features}).encode()
    try:
        tokens = read_rendered(RequestKind.CHAT, body)
    except ERRORS:
        return
    (ids,) = tokens.prompts
    assert ids.tolist() == token_ids[: len(ids)]
    assert (tokens.total, tokens.partial) == (len(token_ids), MEDIA if len(ids) < len(token_ids) else None)
    for items in tokens.media:
        ends = [0, *(item.offset + item.length for item in items)]
        assert all(end <= item.offset for end, item in zip(ends, items, strict=False))
        assert all(begin < end for begin, end in pairwise(ends))
        assert ends[-1] <= len(ids)
    places = (features or {}).get("mm_placeholders") or {}
    if not tokens.media and (offsets := [at["offset"] for items in places.values() for at in items]):
        assert len(ids) == min(offsets)
    (extras,) = tokens.extras(4)
    assert len(BlockHasher(4, 1).chain(0, ids, extras)) == len(ids) // 4


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["token_ids", "features", "mm_hashes", "mm_placeholders", "image", "offset", "length"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(
    st.sampled_from([RequestKind.CHAT, RequestKind.COMPLETIONS]),
    JSON.map(json.dumps).map(str.encode) | st.binary(),
)
@settings(deadline=None)
def test_any_response_is_parsed_or_rejected(kind: RequestKind, data: bytes) -> None:
    """Any bytes give prompts or one of the documented errors."""
    try:
        tokens = read_rendered(kind, data)
    except ERRORS:
        return
    assert len(tokens.media) in (0, len(tokens.prompts))
