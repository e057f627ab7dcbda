"""Chats with images: the router's token ids and image places equal those of the engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.keys import MultimodalItem
from router.errors import RequestError
from router.prompts.remote_tokenizers import read_rendered
from router.prompts.request import MEDIA, PromptTokens, RequestKind, RouteRequest
from router.prompts.tokenizers import TokenizerRegistry
from tests.support.indexer.views import OnePod, stored
from tests.support.tokenization.images import (
    FAMILIES,
    PARTS,
    TEXT,
    files_of,
    image_part,
    image_url,
    library,
    write_model,
)
from tokenization import PromptTokenizer
from tokenization.images.prompts import ImageSize
from tokenization.images.rules import merge_ids

MODEL = "seer"
GUESS = 1000
SIZES = ((100, 60), (30, 90), (250, 250))
ONE, OTHER, THIRD = (image_part(*size, uuid=f"image-{at}") for at, size in enumerate(SIZES))


def text(said: str) -> dict[str, Any]:
    """Return a text part."""
    return {"type": "text", "text": said}


# Several images in one message and over several messages, with text before, between and after them.
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "See."},
    {"role": "user", "content": [text("a"), ONE, text("b"), OTHER, text("c")]},
    {"role": "assistant", "content": "It is."},
    {"role": "user", "content": [THIRD, text("And this?")]},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., PromptTokenizer]:
    """Return a loader of the families' tokenizers that loads each once."""
    known: dict[tuple[str, str], PromptTokenizer] = {}

    def load(family: str, template: str = PARTS) -> PromptTokenizer:
        if (family, template) not in known:
            directory = tmp_path_factory.mktemp(family)
            known[family, template] = PromptTokenizer.from_directory(
                write_model(directory, family, template=template)
            )
        return known[family, template]

    return load


def tokens_of(tokenizer: PromptTokenizer, messages: object = CHAT, **fields: object) -> PromptTokens:
    """Return the router's prompt tokens of a chat."""
    body = {"model": MODEL, "messages": messages, **fields}
    return TokenizerRegistry({MODEL: tokenizer}).prompt_tokens(
        RouteRequest("id", RequestKind.CHAT, MODEL, body, body_bytes=400), MODEL
    )


def rendered(family: str, shown: str, names: list[str]) -> bytes:
    """Return the render endpoint's answer for a text with images of `SIZES`, expanded as by vLLM."""
    tokenizer, rule = library(family), RULES[family]
    ids: list[int] = []
    places: list[dict[str, int]] = []
    for token_id in tokenizer.encode(shown, add_special_tokens=False).ids:
        if token_id != rule.placeholder_id:
            ids.append(token_id)
            continue
        expansion = rule.expand(ImageSize(*SIZES[len(places)]))
        places.append({"offset": len(ids), "length": len(expansion)})
        ids += expansion.tolist()
    whole, offsets = merge_ids(np.array(ids, np.uint32), rule.merges, [place["offset"] for place in places])
    places = [{**place, "offset": offset} for place, offset in zip(places, offsets, strict=True)]
    features = {"mm_hashes": {"image": names}, "mm_placeholders": {"image": places}}
    return json.dumps({"token_ids": whole.tolist(), "features": features}).encode()


RULES: dict[str, Any] = {}


@pytest.fixture(autouse=True, scope="module")
def rules(tokenizer: Callable[..., PromptTokenizer]) -> None:
    """Return the rules by family."""
    RULES.update({family: tokenizer(family).image_rule for family in FAMILIES})


def shown_as(family: str, template: str) -> str:
    """Return the rendered text of `CHAT`, written by hand."""
    mark = FAMILIES[family][0]
    if template == PARTS:
        first, second, last = f"a{mark}b{mark}c", f"{mark}And this?", "\n"
    else:
        first, second, last = f"{mark}\n{mark}\na\nb\nc", f"{mark}\nAnd this?", ""
    turns = (("system", "See."), ("user", first), ("assistant", "It is."), ("user", second))
    return "".join(f"<turn>{role}\n{said}" for role, said in turns) + f"<turn>assistant{last}"


@pytest.mark.parametrize("raw", [False, True], ids=["decoded", "json"])
@pytest.mark.parametrize("template", [PARTS, TEXT], ids=["parts", "text"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_chats_ids_are_those_that_the_engine_renders(
    family: str, template: str, raw: bool, tokenizer: Callable[..., PromptTokenizer]
) -> None:
    """All ids, items and the total equal the engine's, for templates with parts and with texts."""
    messages = msgspec.Raw(json.dumps(CHAT).encode()) if raw else CHAT
    tokens = tokens_of(tokenizer(family, template), messages)
    if template == TEXT and family in ("pixtral", "mistral"):
        # The processor does not replace the placeholders that vLLM adds before the text.
        assert (tokens.partial, tokens.media) == (MEDIA, ())
        return
    names = [part["uuid"] for part in (ONE, OTHER, THIRD)]
    expected = read_rendered(RequestKind.CHAT, rendered(family, shown_as(family, template), names))
    assert [ids.tolist() for ids in tokens.prompts] == [ids.tolist() for ids in expected.prompts]
    assert (tokens.total, tokens.degraded, tokens.partial) == (expected.total, None, None)
    assert tokens.media == expected.media != ()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("named", range(3))
def test_a_prompt_is_known_up_to_its_first_unnamed_image(
    named: int, family: str, tokenizer: Callable[..., PromptTokenizer]
) -> None:
    """A prompt's ids end at the first image without a name, but the total is exact."""
    whole = tokens_of(tokenizer(family))
    unnamed = [ONE, OTHER, THIRD][named]
    chat = json.loads(json.dumps(CHAT).replace(f', "uuid": "{unnamed["uuid"]}"', ""))
    tokens = tokens_of(tokenizer(family), chat)
    (items,), (ids,) = whole.media, whole.prompts
    assert tokens.prompts[0].tolist() == ids[: items[named].offset].tolist()
    assert (tokens.total, tokens.partial) == (len(ids), MEDIA)
    assert tokens.media == ((items[:named],) if named else ())


@pytest.mark.parametrize("uuid", ["", 5, True, [], {}])
def test_invalid_names_are_ignored(uuid: object, tokenizer: Callable[..., PromptTokenizer]) -> None:
    """Only a non-empty text counts as an image's name."""
    tokens = tokens_of(tokenizer("qwen"), [{"role": "user", "content": [image_part(60, 60, uuid)]}])
    assert (tokens.media, tokens.partial) == ((), MEDIA)
    assert (
        tokens.total
        == tokens_of(tokenizer("qwen"), [{"role": "user", "content": [image_part(60, 60, "x")]}]).total
    )


ELSEWHERE = {"type": "image_url", "image_url": {"url": "http://host/image.png"}, "uuid": "far"}
KEPT = {"type": "image_url", "image_url": None, "uuid": "far"}


@pytest.mark.parametrize("part", [ELSEWHERE, KEPT], ids=["elsewhere", "kept by the engine"])
def test_an_image_of_unknown_size_ends_the_known_prefix(
    part: dict[str, Any], tokenizer: Callable[..., PromptTokenizer]
) -> None:
    """Up to an image of unknown size all is known, after it the number of text tokens."""
    messages = [{"role": "user", "content": [ONE, text("and"), part, text("which?")]}]
    tokens = tokens_of(tokenizer("qwen"), messages)
    known = tokens_of(
        tokenizer("qwen"), [{"role": "user", "content": [ONE, text("and"), OTHER, text("which?")]}]
    )
    (items,) = known.media
    assert tokens.prompts[0].tolist() == known.prompts[0][: items[1].offset].tolist()
    assert (tokens.media, tokens.partial) == ((items[:1],), MEDIA)
    assert tokens.total == known.total - items[1].length + GUESS
    for family in ("llava", "gemma"):
        # Families whose images all have the same ids.
        assert tokens_of(tokenizer(family), messages).partial is None


SOUND = {"type": "audio_url", "audio_url": {"url": "data:,"}}


@pytest.mark.parametrize(
    ("content", "fields"),
    [
        ([ONE, SOUND], {}),
        ([{"type": "video_url", "video_url": {"url": "data:,"}}], {}),
        ([{"type": "image_embeds", "image_embeds": "x", "uuid": "x"}], {}),
        ([{"type": "image_pil", "image_pil": "x", "uuid": "x"}], {}),
        ([{"type": "image_pil", "image_url": {"url": image_url(9, 9)}, "uuid": "x"}], {}),
        ([ONE, text("<|image_pad|>")], {}),
        ([ONE], {"mm_processor_kwargs": {"max_pixels": 1}}),
        ([ONE], {"media_io_kwargs": {"image": {}}}),
    ],
)
def test_ambiguous_media_end_the_known_prefix(
    content: list[dict[str, Any]], fields: dict[str, Any], tokenizer: Callable[..., PromptTokenizer]
) -> None:
    """Other media, unsupported forms, extra placeholders and options end the prompt at the first item."""
    tokens = tokens_of(tokenizer("qwen"), [{"role": "user", "content": [text("a"), *content]}], **fields)
    (ids,) = tokens.prompts
    assert (tokens.degraded, tokens.partial, tokens.media) == (None, MEDIA, ())
    assert tokens.total == len(ids) + GUESS
    assert ids.tolist() == library("qwen").encode("<turn>user\na<|vision_start|>").ids[: len(ids)]


def test_empty_options_are_ignored(tokenizer: Callable[..., PromptTokenizer]) -> None:
    """Empty processing options, which some SDKs send, are ignored."""
    assert tokens_of(tokenizer("qwen"), mm_processor_kwargs={}, media_io_kwargs=None).partial is None


def test_a_prompt_with_images_is_not_truncated(tokenizer: Callable[..., PromptTokenizer]) -> None:
    """Truncation of a prompt with images is unsupported."""
    assert tokens_of(tokenizer("qwen"), truncate_prompt_tokens=5).degraded == "unsupported_prompt"


def test_the_number_of_examined_images_is_bounded(tokenizer: Callable[..., PromptTokenizer]) -> None:
    """Only a fixed number of images is examined; the lengths of further ones are estimated."""
    part = image_part(60, 60, "x")
    one, tokens = (
        tokens_of(tokenizer("qwen"), [{"role": "user", "content": [part] * count}]) for count in (1, 200)
    )
    assert (len(tokens.media[0]), tokens.partial) == (128, MEDIA)
    length = one.media[0][0].length
    assert tokens.total == one.total - length + 200 * 2 - 2 + 128 * length + 72 * GUESS


def test_too_many_ids_are_not_created(tmp_path: Path) -> None:
    """For rules that need no size the number of ids is limited."""
    files = files_of("llava")
    files["config"]["vision_config"] = {
        "model_type": "siglip_vision_model",
        "image_size": 2800,
        "patch_size": 14,
    }
    files["config"]["vision_feature_select_strategy"] = "full"
    tokenizer = PromptTokenizer.from_directory(write_model(tmp_path, "llava", files))
    assert tokens_of(tokenizer, [{"role": "user", "content": [ELSEWHERE] * 10}]).total > 400_000
    tokens = tokens_of(tokenizer, [{"role": "user", "content": [ELSEWHERE] * 200}])
    assert (tokens.partial, tokens.media, tokens.total < 2000) == (MEDIA, (), True)


def test_images_of_other_apis_count_exactly(tokenizer: Callable[..., PromptTokenizer]) -> None:
    """Images of Anthropic and Responses requests expand like a chat's, without a name."""
    url = image_url(100, 60)
    expected = tokens_of(tokenizer("qwen"), [{"role": "user", "content": [ONE, text("?")]}])
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    anthropic = [{"role": "user", "content": [{"type": "image", "source": source}, text("?")]}]
    items = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "?"}]
    bodies = {
        RequestKind.MESSAGES: {"messages": anthropic},
        RequestKind.RESPONSES: {"input": [{"role": "user", "content": items}]},
    }
    for kind, body in bodies.items():
        tokens = TokenizerRegistry({MODEL: tokenizer("qwen")}).prompt_tokens(
            RouteRequest("id", kind, MODEL, body, body_bytes=400), MODEL
        )
        assert (tokens.total, tokens.partial) == (expected.total, MEDIA), kind
        assert tokens.prompts[0].tolist() == expected.prompts[0][: expected.media[0][0].offset].tolist()


SIDE_BY_SIDE = [{"role": "user", "content": [ONE, OTHER, THIRD, text("Which?")]}]


@pytest.mark.parametrize("chat", [CHAT, SIDE_BY_SIDE], ids=["with text between", "side by side"])
@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_of_an_image_are_found_by_its_name(
    family: str, chat: list[dict[str, Any]], tokenizer: Callable[..., PromptTokenizer]
) -> None:
    """Keys equal those of a store with the name in its extra keys, and differ after an image of another name.

    This includes Gemma's images, which share the newlines between them.
    """
    tokens = tokens_of(tokenizer(family), chat)
    (ids,), (items,) = tokens.prompts, tokens.media
    assert (len(items), tokens.partial) == (3, None)
    blocks = len(ids) // 4
    extra_keys = [
        [[item.identifier, item.offset - start] for item in items if overlaps(item, start)] or None
        for start in range(0, 4 * blocks, 4)
    ]
    for flat in (True, False):
        pod = OnePod(block_tokens=4, flat=flat)
        event = stored(list(range(1, blocks + 1)), ids[: 4 * blocks].tolist(), extra_keys=extra_keys)
        assert not pod.apply(event).skipped
        (extras,) = tokens.extras(4)
        assert pod.match(pod.keys(ids.tolist(), extras=extras)).cached_blocks == blocks
        for item in items:
            renamed = json.loads(json.dumps(chat).replace(item.identifier, "another"))
            other = tokens_of(tokenizer(family), renamed)
            assert other.prompts[0].tolist() == ids.tolist()
            (extras,) = other.extras(4)
            assert pod.match(pod.keys(ids.tolist(), extras=extras)).cached_blocks == item.offset // 4


def overlaps(item: MultimodalItem, start: int) -> bool:
    """Return whether an item has ids in a block of four tokens."""
    return item.offset < start + 4 and start < item.offset + item.length


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6) | st.just(image_url(9, 9)),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["url", "x"]), inner, max_size=2)
    ),
    max_leaves=4,
)
PART = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["image_url", "input_image", "image_pil", "text", "video_url"]) | ANY,
        "image_url": ANY,
        "uuid": ANY,
        "text": ANY,
    },
)


@given(st.lists(PART | ANY, max_size=4), st.sampled_from(list(FAMILIES)))
@settings(deadline=None)
def test_hostile_parts_have_a_clear_outcome(
    tokenizer: Callable[..., PromptTokenizer], parts: list[object], family: str
) -> None:
    """Any message gives tokens, a known reason or a 400 error."""
    status = 400
    try:
        tokens = tokens_of(tokenizer(family), [{"role": "user", "content": parts}])
    except RequestError as error:
        status = error.status
        tokens = PromptTokens((), 0, "unsupported_prompt")
    assert status == 400
    assert tokens.degraded in (None, "unsupported_prompt")
    assert tokens.partial in (None, MEDIA)
    if tokens.degraded is None:
        assert sum(map(len, tokens.prompts)) <= tokens.total
        assert (tokens.partial is None) == (len(tokens.prompts[0]) == tokens.total)
