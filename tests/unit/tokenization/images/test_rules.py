"""Image rules equal the processors of `transformers`, and merging of ids equals vLLM's."""

from __future__ import annotations

import re
from functools import cache

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.support.depth import examples
from tests.support.tokenization.images import LLAVA_VISION, library
from tokenization.images.prompts import ImageSize
from tokenization.images.rules import ImageFiles, by_pixels, constant, image_rule, in_rows, merge_ids

SIDES = st.integers(1, 700) | st.integers(1, 20_000)
SQUARES = st.sampled_from([(14, 2), (16, 2), (14, 1)])
GEMMA = {
    "boi_token": "<start_of_image>",
    "image_token": "<image_soft_token>",
    "eoi_token": "<end_of_image>",
}


def picture(size: tuple[int, int]) -> Image.Image:
    """Return an image of this width and height."""
    return Image.new("RGB", size)


@given(
    SIDES,
    SIDES,
    SQUARES,
    st.sampled_from([(3136, 12_845_056), (65_536, 16_777_216), (3136, 200_704), (1, 1 << 26)]),
)
@settings(deadline=None)
def test_qwens_patches_are_the_processors(
    width: int, height: int, squares: tuple[int, int], pixels: tuple[int, int]
) -> None:
    """Qwen-VL images have one id per merged patch of the processor's grid, in either orientation."""
    patch, merge = squares
    image_processor = Qwen2VLImageProcessorPil(
        patch_size=patch, merge_size=merge, min_pixels=pixels[0], max_pixels=pixels[1]
    )
    expand = by_pixels(7, patch * merge, *pixels)
    ids, turned = expand(ImageSize(width, height)), expand(ImageSize(height, width))
    if ids is None or turned is None:
        # Releases disagree on images thinner than a patch, and reject those that are too long.
        assert ids is turned
        assert min(width, height) < patch * merge or max(width, height) > 100 * min(width, height)
        return
    patches = image_processor.get_number_of_image_patches(height, width)
    assert ids.tolist() == turned.tolist() == [7] * (patches // merge**2)


@pytest.mark.parametrize("size", [(40, 60), (333, 41), (56, 84), (500, 500)])
def test_qwens_grid_is_that_of_processed_pixels(size: tuple[int, int]) -> None:
    """The grid equals that of an image which the processor actually processes."""
    image_processor = Qwen2VLImageProcessorPil(
        patch_size=14, merge_size=2, min_pixels=3136, max_pixels=100_352
    )
    grid = image_processor(images=[picture(size)])["image_grid_thw"][0]
    ids = by_pixels(7, 28, 3136, 100_352)(ImageSize(*size))
    assert ids is not None
    assert len(ids) == int(np.prod(grid)) // 4


@given(st.integers(1, 400), st.integers(1, 400), st.sampled_from([(8, 1, 96), (14, 2, 280), (16, 1, 100)]))
@settings(deadline=None, max_examples=examples(60))
def test_pixtrals_rows_are_the_processors(width: int, height: int, kind: tuple[int, int, int]) -> None:
    """Pixtral images have the processor's rows, each with a break id, the last with an end id."""
    patch, merge, edge = kind
    side = patch * merge
    image_processor = PixtralImageProcessorPil(size={"longest_edge": edge}, patch_size=patch)
    ids = in_rows(1, 2, 3, side, edge)(ImageSize(width, height))
    if ids is None:
        assert max(width, height) > edge * min(width, height)
        return
    sizes = image_processor(images=[picture((width, height))], patch_size={"height": side, "width": side})
    rows, columns = (int(length) // side for length in sizes["image_sizes"][0])
    assert ids.tolist() == ([1] * columns + [2]) * (rows - 1) + [1] * columns + [3]


@pytest.mark.parametrize("vision", [LLAVA_VISION, {**LLAVA_VISION, "image_size": 84}])
@pytest.mark.parametrize("strategy", ["default", "full"])
def test_llavas_images_are_the_processors(vision: dict[str, int], strategy: str) -> None:
    """LLaVA images have the processor's number of ids, with the class token by strategy."""
    tokenizer, edge = library("llava"), vision["image_size"]
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "image_token_index": tokenizer.token_to_id("<image>"),
        "vision_config": vision,
        "vision_feature_select_strategy": strategy,
    }
    rule = image_rule(ImageFiles(config, {}, {}, {}), tokenizer)
    image_processor = CLIPImageProcessorPil(
        size={"shortest_edge": edge}, crop_size={"height": edge, "width": edge}
    )
    processor = LlavaProcessor(
        image_processor,
        PreTrainedTokenizerFast(tokenizer_object=tokenizer),
        patch_size=14,
        vision_feature_select_strategy=strategy,
        num_additional_image_tokens=1,
    )
    made = processor(images=[picture((300, 200))], text=["<image>"])["input_ids"][0]
    assert rule is not None
    ids = rule.expand(None)
    assert ids is not None
    assert ids.tolist() == list(made)


@cache
def gemma() -> Gemma3Processor:
    """Return Gemma's processor with a small tokenizer."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=library("gemma"), extra_special_tokens=GEMMA)
    return Gemma3Processor(Gemma3ImageProcessorPil(), tokenizer, image_seq_length=6)


@given(st.lists(st.sampled_from(["a", "b", "\n", "\n\n", "<start_of_image>"]), min_size=1, max_size=9))
@settings(deadline=None)
def test_gemmas_images_are_the_processors(texts: list[str]) -> None:
    """Inserting Gemma's image ids gives the ids of the text with the images written out.

    Cases with more than two newlines beside an image, or only newlines between two, are excluded: vLLM merges
    only pairs, so its ids differ from those of any text.
    """
    text, tokenizer = "".join(texts), library("gemma")
    images = text.count("<start_of_image>")
    assume(images and not re.search("\n{3}|>\n+<", text))
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "mm_tokens_per_image": 6}
    rule = image_rule(ImageFiles(config, {}, {"image_seq_length": 6}, GEMMA), tokenizer)
    assert rule is not None
    expansion = rule.expand(None)
    assert expansion is not None
    plain = tokenizer.encode(text, add_special_tokens=False).ids
    placed: list[int] = []
    offsets: list[int] = []
    for token_id in plain:
        if token_id == rule.placeholder_id:
            offsets.append(len(placed))
            placed += expansion.tolist()
        else:
            placed.append(token_id)
    ids, starts = merge_ids(np.array(placed, np.uint32), rule.merges, offsets)
    made = gemma()(images=[[picture((30, 20))] * images], text=[text], add_special_tokens=False)
    assert ids.tolist() == list(made["input_ids"][0])
    # An image begins with its newlines, or with the merged id that contains them.
    assert [ids[start + 1] for start in starts] == [rule.placeholder_id] * images


@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 11), max_size=4))
def test_merging_ids_equals_replacing_pairs_one_by_one(ids: list[int], at: list[int]) -> None:
    """Merging equals vLLM's replacement of pairs: from the left, without overlap, one kind at a time."""
    merges = ((1, 2, 3), (2, 1, 3), (2, 2, 4))
    # Each id with the places that were merged into it.
    expected = [(token_id, [place]) for place, token_id in enumerate(ids)]
    for first, second, both in merges:
        replaced: list[tuple[int, list[int]]] = []
        while expected:
            if [token_id for token_id, _ in expected[:2]] == [first, second]:
                replaced.append((both, expected[0][1] + expected[1][1]))
                expected = expected[2:]
            else:
                replaced.append(expected.pop(0))
        expected = replaced
    offsets = [place for place in at if place < len(ids)]
    found, starts = merge_ids(np.array(ids, np.uint32), merges, offsets)
    assert found.tolist() == [token_id for token_id, _ in expected]
    assert list(starts) == [
        next(n for n, (_, places) in enumerate(expected) if place in places) for place in offsets
    ]


def test_a_constant_rule_needs_no_size() -> None:
    """If all images have the same ids, an image of unknown size has them as well."""
    ids = constant([1, 2])(None)
    assert ids is not None
    assert ids.tolist() == [1, 2]
    assert by_pixels(1, 28, 1, 1000)(None) is None
    assert in_rows(1, 2, 3, 8, 96)(None) is None
