"""Rules for images in a model's prompts: its files in, a rule out, or None for what is not surely known.

The family is what vLLM goes by: the architecture in config.json. Any other, code of the model's own, a
processor of another name and settings that contradict each other have no rule. Each rule is that of a
family's processor in `transformers`, in the form in which vLLM puts the ids into the prompt (the
PromptReplacement in its model_executor/models: qwen2_vl, qwen3_vl, llava, gemma3_mm, mistral3).
Reads no files; knows no chats and no image data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from tokenizers import Tokenizer

from tokenization.encoder import TokenIds
from tokenization.templates.files import token_text_of

_ASPECT_MAX = 200


class ImageSize(NamedTuple):
    """In pixels, as the file has them: no orientation is applied."""

    width: int
    height: int


@dataclass(frozen=True, slots=True)
class ImageRule:
    """How one model's images stand in its prompts."""

    placeholder_id: int  # what the chat template leaves in an image's place
    # What engines put in front of a message's text for each of its images, for a template that takes no
    # parts; empty: nothing.
    placeholder_text: str
    # The ids that take the placeholder's place, of an image of this size (None: not known); None where they
    # are not surely known.
    expand: Callable[[ImageSize | None], TokenIds | None]
    reads_size: bool = True  # whether these ids depend on the size
    upright: bool = False  # whether they change when width and height change places
    joins: tuple[tuple[int, int, int], ...] = ()  # ids that become one where they meet: first, second, both


def always(ids: Sequence[int]) -> Callable[[ImageSize | None], TokenIds | None]:
    """The same for every image."""
    known = np.array(ids, np.uint32)
    return lambda _: known


def by_pixels(
    image_id: int, side: int, pixels_min: int, pixels_max: int
) -> Callable[[ImageSize | None], TokenIds | None]:
    """One id for each square of the resized image, as Qwen-VL's `smart_resize` has it (from Qwen2-VL on).

    Args:
        side: Of a square, in pixels: a patch times the patches that are merged along a side.
        pixels_min: Smaller images are enlarged.
        pixels_max: Larger images are made smaller.
    """

    def expand(size: ImageSize | None) -> TokenIds | None:
        tokens = None if size is None else _squares(size, side, pixels_min, pixels_max)
        return None if tokens is None else np.full(tokens, image_id, np.uint32)

    return expand


def in_rows(
    image_id: int, break_id: int, end_id: int, side: int, edge_max: int
) -> Callable[[ImageSize | None], TokenIds | None]:
    """One id for each square, row by row, as Pixtral's processor has it since transformers 4.49.

    Args:
        break_id: Ends a row.
        end_id: Ends the last row.
        side: Of a square, in pixels.
        edge_max: Longest side of an image, in pixels; larger images are made smaller.
    """

    def expand(size: ImageSize | None) -> TokenIds | None:
        if size is None:
            return None
        ratio = max(size.width / edge_max, size.height / edge_max, 1)
        columns, rows = (-(-math.floor(length / ratio) // side) for length in size)
        if not columns or not rows:
            return None
        ids = np.full((rows, columns + 1), image_id, np.uint32)
        ids[:, -1] = break_id
        ids[-1, -1] = end_id
        return ids.reshape(-1)

    return expand


def joined(
    ids: TokenIds, joins: Sequence[tuple[int, int, int]], offsets: Sequence[int]
) -> tuple[TokenIds, Sequence[int]]:
    """Ids after `ImageRule.joins`, and where what stood at `offsets` (shape: images) stands then."""
    at = np.array(offsets, np.int64)
    for first, second, both in joins:
        pairs = np.flatnonzero((ids[:-1] == first) & (ids[1:] == second))
        if first == second:
            pairs = _apart(pairs)
        if len(pairs):
            ids = ids.copy()
            ids[pairs] = both
            ids = np.delete(ids, pairs + 1)
            at -= np.searchsorted(pairs + 1, at, side="right")
    return ids, at.tolist()


def _squares(size: ImageSize, side: int, pixels_min: int, pixels_max: int) -> int | None:
    """How many squares; None where releases of `transformers` do not agree, or refuse the image."""
    short, long = sorted(size)
    if short < side or long / short > _ASPECT_MAX:
        return None
    pixels = short * long
    sides = [round(length / side) * side for length in (short, long)]
    if sides[0] * sides[1] > pixels_max:
        shrink = math.sqrt(pixels / pixels_max)
        sides = [math.floor(length / shrink / side) * side for length in (short, long)]
    elif sides[0] * sides[1] < pixels_min:
        grow = math.sqrt(pixels_min / pixels)
        sides = [math.ceil(length * grow / side) * side for length in (short, long)]
    return (sides[0] // side) * (sides[1] // side) or None


def _apart(pairs: np.ndarray[tuple[int], np.dtype[np.intp]]) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """Those of equal ids that do not share one, from the left."""
    kept: list[int] = []
    for pair in pairs.tolist():
        if not kept or pair > kept[-1] + 1:
            kept.append(pair)
    return np.array(kept, np.intp)


Settings: TypeAlias = Mapping[str, Any]

_NONE: Settings = {}
# A count or a length that no real model has is a mistake in its files.
_COUNT_MAX = 1 << 28
_GEMMA_TOKENS, _GEMMA_NEWLINES = 256, ("\n", "\n\n", "\n\n\n", "\n\n\n\n")
_LLAVA_VISION = {"clip_vision_model": 1, "siglip_vision_model": 0}


@dataclass(frozen=True, slots=True)
class ImageFiles:
    """Facts of config.json and the files like it about a model's images; empty for one that is not there."""

    config: Settings
    preprocessor: Settings
    processor: Settings
    tokenizer: Settings


def image_rule(files: ImageFiles, tokenizer: Tokenizer) -> ImageRule | None:
    """The rule of a model."""
    match files.config.get("architectures"):
        case [str(name)] if name in _FAMILIES:
            family = _FAMILIES[name]
        case _:
            return None
    image = _image_settings(files)
    if image is None or not _is_usual(files, image, family):
        return None
    return family.rule(files, image, tokenizer)


def _image_settings(files: ImageFiles) -> Settings | None:
    """The image processor's, which stand in either file; None where both have them."""
    nested = files.processor.get("image_processor")
    if nested is None:
        return files.preprocessor
    return nested if isinstance(nested, dict) and not files.preprocessor else None


def _is_usual(files: ImageFiles, image: Settings, family: _Family) -> bool:
    """Whether the processor is one that the rule was made from, and no code comes with the model."""
    if any("auto_map" in settings for settings in (files.preprocessor, files.processor, image)):
        return False
    told = (files.preprocessor.get("processor_class"), files.processor.get("processor_class"))
    if not all(name is None or name in family.processors for name in told):
        return False
    kind = image.get("image_processor_type")
    known = kind is None or str(kind).removesuffix("Fast").removesuffix("Pil") in family.image_processors
    return (known or not family.image_processors) and image.get("do_resize") in (None, True)


def _qwen(files: ImageFiles, image: Settings, tokenizer: Tokenizer) -> ImageRule | None:
    """Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5."""
    vision = _dict(files.config, "vision_config")
    size = _dict(image, "size")
    patch = _agreed(image.get("patch_size"), vision.get("patch_size"))
    merge = _agreed(image.get("merge_size"), vision.get("spatial_merge_size"))
    pixels_min = _agreed(size.get("shortest_edge"), image.get("min_pixels"))
    pixels_max = _agreed(size.get("longest_edge"), image.get("max_pixels"))
    image_id = _id(tokenizer, _token(files.tokenizer, "image_token") or "<|image_pad|>")
    if None in (image.get("patch_size"), image.get("merge_size")) or size.keys() & {
        "min_pixels",
        "max_pixels",
    }:
        return None
    if patch is None or merge is None or pixels_min is None or pixels_max is None or image_id is None:
        return None
    if pixels_min > pixels_max or files.config.get("image_token_id", image_id) != image_id:
        return None
    text = "<|vision_start|><|image_pad|><|vision_end|>"
    return ImageRule(image_id, text, by_pixels(image_id, patch * merge, pixels_min, pixels_max))


def _llava(files: ImageFiles, image: Settings, tokenizer: Tokenizer) -> ImageRule | None:
    """LLaVA 1.5 and its kin by their encoder; with Pixtral's, the HF form of Pixtral 12B.

    How many ids is what vLLM reckons from config.json alone: the processor's own word is not asked.
    """
    vision = _dict(files.config, "vision_config")
    if vision.get("model_type") == "pixtral":
        return _pixtral(files, image, tokenizer)
    image_id = _agreed(files.config.get("image_token_index"), files.config.get("image_token_id"))
    edge, patch = _agreed(vision.get("image_size")), _agreed(vision.get("patch_size"))
    others = _LLAVA_VISION.get(str(vision.get("model_type")))
    left_out = {"default": 1, "full": 0}.get(
        str(files.config.get("vision_feature_select_strategy", "default"))
    )
    if image_id is None or edge is None or patch is None or others is None or left_out is None:
        return None
    tokens = (edge // patch) ** 2 + others - left_out
    if edge % patch or not 0 < tokens <= _COUNT_MAX >> 8:
        return None
    return ImageRule(image_id, "<image>", always([image_id] * tokens), reads_size=False)


def _gemma(files: ImageFiles, image: Settings, tokenizer: Tokenizer) -> ImageRule | None:
    """Gemma 3 without pan and scan; newlines that meet become the tokens that text would have there."""
    if image.get("do_pan_and_scan"):
        return None
    told = [files.processor.get("image_seq_length", _GEMMA_TOKENS), image.get("image_seq_length")]
    tokens = _agreed(*told, files.config.get("mm_tokens_per_image"))
    texts = [_token(files.tokenizer, f"{name}_token") for name in ("boi", "image", "eoi")]
    newlines = [_id(tokenizer, text) for text in _GEMMA_NEWLINES]
    ids = [None if text is None else _id(tokenizer, text) for text in texts]
    if tokens is None or tokens > _COUNT_MAX >> 8 or None in ids or None in newlines:
        return None
    begin, soft, end = (text or "" for text in texts)
    expanded = tokenizer.encode(f"\n\n{begin}{soft * tokens}{end}\n\n", add_special_tokens=False).ids
    one, two, three, four = (token or 0 for token in newlines)
    if expanded != [two, ids[0], *[ids[1]] * tokens, ids[2], two]:
        return None
    joins = ((one, two, three), (two, one, three), (two, two, four))
    return ImageRule(expanded[1], "<start_of_image>", always(expanded), reads_size=False, joins=joins)


def _mistral(files: ImageFiles, image: Settings, tokenizer: Tokenizer) -> ImageRule | None:
    """Mistral Small 3.1 and later in HF form. vLLM has no text for its images: a template must take parts."""
    return _pixtral(files, image, tokenizer, merge=files.config.get("spatial_merge_size", 2), text="")


def _pixtral(
    files: ImageFiles, image: Settings, tokenizer: Tokenizer, *, merge: object = 1, text: str = "<image>"
) -> ImageRule | None:
    """vLLM's releases take the longest edge from either file, so these have to agree."""
    vision, processor = _dict(files.config, "vision_config"), files.processor
    patch = _agreed(vision.get("patch_size"), processor.get("patch_size"))
    merged = _agreed(merge, processor.get("spatial_merge_size"))
    edges = vision.get("image_size"), _dict(image, "size").get("longest_edge")
    edge = _agreed(*edges)
    names = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
    ids = [_id(tokenizer, processor.get(name, usual)) for name, usual in names.items()]
    image_id = _agreed(files.config.get("image_token_index"), files.config.get("image_token_id"), ids[0])
    if patch is None or merged is None or edge is None or None in edges or vision.get("patch_size") is None:
        return None
    if image_id is None or ids[1] is None or ids[2] is None or image.get("do_center_crop"):
        return None
    expand = in_rows(image_id, ids[1], ids[2], patch * merged, edge)
    return ImageRule(image_id, text, expand, upright=True)


def _agreed(*told: object) -> int | None:
    """A positive number that all say who say anything; None where nobody does, or somebody another."""
    values = {repr(value): value for value in told if value is not None}
    if len(values) != 1:
        return None
    (value,) = values.values()
    return value if type(value) is int and 0 < value <= _COUNT_MAX else None


def _dict(settings: Settings, name: str) -> Settings:
    value = settings.get(name)
    return value if isinstance(value, dict) else _NONE


def _token(settings: Settings, name: str) -> str | None:
    """A special token's text: of its own, or among the extra ones."""
    return token_text_of(settings.get(name, _dict(settings, "extra_special_tokens").get(name)))


def _id(tokenizer: Tokenizer, text: object) -> int | None:
    token_id: int | None = tokenizer.token_to_id(text) if isinstance(text, str) else None
    return token_id


@dataclass(frozen=True, slots=True)
class _Family:
    """One way to make a rule, and the processors that it is made from."""

    rule: Callable[[ImageFiles, Settings, Tokenizer], ImageRule | None]
    processors: tuple[str, ...]  # names in `processor_class`
    image_processors: tuple[str, ...] = ()  # `image_processor_type` without a backend; empty: any


_QWEN = _Family(
    _qwen, ("Qwen2VLProcessor", "Qwen2_5_VLProcessor", "Qwen3VLProcessor"), ("Qwen2VLImageProcessor",)
)
_FAMILIES: Mapping[str, _Family] = {
    "Qwen2VLForConditionalGeneration": _QWEN,
    "Qwen2_5_VLForConditionalGeneration": _QWEN,
    "Qwen3VLForConditionalGeneration": _QWEN,
    "Qwen3VLMoeForConditionalGeneration": _QWEN,
    "Qwen3_5ForConditionalGeneration": _QWEN,
    "Qwen3_5MoeForConditionalGeneration": _QWEN,
    "LlavaForConditionalGeneration": _Family(_llava, ("LlavaProcessor", "PixtralProcessor")),
    "Gemma3ForConditionalGeneration": _Family(_gemma, ("Gemma3Processor",), ("Gemma3ImageProcessor",)),
    "Mistral3ForConditionalGeneration": _Family(_mistral, ("PixtralProcessor",), ("PixtralImageProcessor",)),
}
