"""Image rules: derive from a model's settings how images expand in its prompts; None if in doubt.

As in vLLM, the architecture in config.json selects the family. Unknown architectures, models with their own
code, other processors and contradictory settings have no rule. A rule follows the family's processor in
`transformers` and the ids that vLLM inserts for it (PromptReplacement in its model_executor/models: qwen2_vl,
qwen3_vl, llava, gemma3_mm, mistral3).
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
    """Size of an image file in pixels, without applying an orientation."""

    width: int
    height: int


# Returns the ids that replace the placeholder of an image of this size (None: unknown); None if in doubt.
Expansion: TypeAlias = Callable[[ImageSize | None], TokenIds | None]


@dataclass(frozen=True, slots=True)
class ImageRule:
    """Expansion of images in one model's prompts."""

    placeholder_id: int  # id that the chat template writes for an image
    # Text that engines add before a message's text for each image if the template takes no parts; may be
    # empty.
    placeholder_text: str
    expand: Expansion
    reads_size: bool = True  # whether the ids depend on the image's size
    oriented: bool = False  # whether exchanging width and height changes the ids
    merges: tuple[tuple[int, int, int], ...] = ()  # adjacent ids to merge: first, second, merged


def constant(ids: Sequence[int]) -> Expansion:
    """Return an expansion to the same ids for every image."""
    known = np.array(ids, np.uint32)
    return lambda _: known


def by_pixels(image_id: int, side: int, pixels_min: int, pixels_max: int) -> Expansion:
    """Return an expansion to one id per merged patch of the resized image (`smart_resize` of Qwen2-VL).

    Args:
        side: Side of a merged patch in pixels: patch size times merge size.
        pixels_min: Smaller images are enlarged.
        pixels_max: Larger images are shrunk.
    """

    def expand(size: ImageSize | None) -> TokenIds | None:
        tokens = None if size is None else _patch_count(size, side, pixels_min, pixels_max)
        return None if tokens is None else np.full(tokens, image_id, np.uint32)

    return expand


def in_rows(image_id: int, break_id: int, end_id: int, side: int, edge_max: int) -> Expansion:
    """Return an expansion to one id per patch in rows, as Pixtral's processor since transformers 4.49.

    Args:
        break_id: Id after each row except the last.
        end_id: Id after the last row.
        side: Side of a (merged) patch in pixels.
        edge_max: Longest side of an image in pixels; larger images are shrunk.
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


def merge_ids(
    ids: TokenIds, merges: Sequence[tuple[int, int, int]], offsets: Sequence[int]
) -> tuple[TokenIds, Sequence[int]]:
    """Apply `ImageRule.merges` to ids; return the ids and the shifted `offsets`."""
    at = np.array(offsets, np.int64)
    for first, second, both in merges:
        pairs = np.flatnonzero((ids[:-1] == first) & (ids[1:] == second))
        if first == second:
            pairs = _disjoint(pairs)
        if len(pairs):
            ids = ids.copy()
            ids[pairs] = both
            ids = np.delete(ids, pairs + 1)
            at -= np.searchsorted(pairs + 1, at, side="right")
    return ids, at.tolist()


def _patch_count(size: ImageSize, side: int, pixels_min: int, pixels_max: int) -> int | None:
    """Return the number of merged patches; None if releases of `transformers` differ or reject the image."""
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


def _disjoint(pairs: np.ndarray[tuple[int], np.dtype[np.intp]]) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """Return the pairs of equal ids that do not overlap, from the left."""
    kept: list[int] = []
    for pair in pairs.tolist():
        if not kept or pair > kept[-1] + 1:
            kept.append(pair)
    return np.array(kept, np.intp)


Settings: TypeAlias = Mapping[str, Any]

# Larger counts and lengths are mistakes in a model's files.
_COUNT_MAX = 1 << 28
_GEMMA_TOKENS, _GEMMA_NEWLINES = 256, ("\n", "\n\n", "\n\n\n", "\n\n\n\n")
_LLAVA_VISION = {"clip_vision_model": 1, "siglip_vision_model": 0}


@dataclass(frozen=True, slots=True)
class ImageFiles:
    """Contents of a model's settings files; empty for a missing file."""

    config: Settings
    preprocessor: Settings
    processor: Settings
    tokenizer: Settings


def image_rule(files: ImageFiles, tokenizer: Tokenizer) -> ImageRule | None:
    """Return the rule of a model, or None if it is unknown."""
    match files.config.get("architectures"):
        case [str(name)] if name in _FAMILIES:
            family = _FAMILIES[name]
        case _:
            return None
    image = _image_settings(files)
    if image is None or not _is_supported(files, image, family):
        return None
    return family.rule(files, image, tokenizer)


def _image_settings(files: ImageFiles) -> Settings | None:
    """Return the image processor's settings, which are in one of two files; None if both have them."""
    nested = files.processor.get("image_processor")
    if nested is None:
        return files.preprocessor
    return nested if isinstance(nested, dict) and not files.preprocessor else None


def _is_supported(files: ImageFiles, image: Settings, family: _Family) -> bool:
    """Return whether the processor is a known one of the family, without custom code of the model."""
    if any("auto_map" in settings for settings in (files.preprocessor, files.processor, image)):
        return False
    names = (files.preprocessor.get("processor_class"), files.processor.get("processor_class"))
    if not all(name is None or name in family.processors for name in names):
        return False
    kind = image.get("image_processor_type")
    known = kind is None or str(kind).removesuffix("Fast").removesuffix("Pil") in family.image_processors
    return (known or not family.image_processors) and image.get("do_resize") in (None, True)


def _qwen(files: ImageFiles, image: Settings, tokenizer: Tokenizer) -> ImageRule | None:
    """Return the rule of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5 models."""
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
    """Return the rule of LLaVA 1.5 models by their vision encoder, including Pixtral 12B in HF form.

    The number of ids follows from config.json alone, as in vLLM; the processor's settings are ignored.
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
    return ImageRule(image_id, "<image>", constant([image_id] * tokens), reads_size=False)


def _gemma(files: ImageFiles, image: Settings, tokenizer: Tokenizer) -> ImageRule | None:
    """Return the rule of Gemma 3 models without pan and scan; adjacent newline tokens merge as in text."""
    if image.get("do_pan_and_scan"):
        return None
    counts = [files.processor.get("image_seq_length", _GEMMA_TOKENS), image.get("image_seq_length")]
    tokens = _agreed(*counts, files.config.get("mm_tokens_per_image"))
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
    merges = ((one, two, three), (two, one, three), (two, two, four))
    return ImageRule(expanded[1], "<start_of_image>", constant(expanded), reads_size=False, merges=merges)


def _mistral(files: ImageFiles, image: Settings, tokenizer: Tokenizer) -> ImageRule | None:
    """Return the rule of Mistral Small 3.1 and later in HF form, whose templates must take parts."""
    return _pixtral(files, image, tokenizer, merge=files.config.get("spatial_merge_size", 2), text="")


def _pixtral(
    files: ImageFiles, image: Settings, tokenizer: Tokenizer, *, merge: object = 1, text: str = "<image>"
) -> ImageRule | None:
    """Return the rule of a Pixtral encoder. Releases of vLLM read either file, so both must agree."""
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
    return ImageRule(image_id, text, expand, oriented=True)


def _agreed(*given: object) -> int | None:
    """Return the positive integer that all given values equal; None if they differ or all are None."""
    values = {repr(value): value for value in given if value is not None}
    if len(values) != 1:
        return None
    (value,) = values.values()
    return value if type(value) is int and 0 < value <= _COUNT_MAX else None


def _dict(settings: Settings, name: str) -> Settings:
    value = settings.get(name)
    return value if isinstance(value, dict) else {}


def _token(settings: Settings, name: str) -> str | None:
    """Return a special token's text by its name, also among the extra ones."""
    return token_text_of(settings.get(name, _dict(settings, "extra_special_tokens").get(name)))


def _id(tokenizer: Tokenizer, text: object) -> int | None:
    token_id: int | None = tokenizer.token_to_id(text) if isinstance(text, str) else None
    return token_id


@dataclass(frozen=True, slots=True)
class _Family:
    """Model family: its rule and the processors for which the rule holds."""

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
