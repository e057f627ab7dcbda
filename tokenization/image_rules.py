"""What an image becomes in a prompt: its width and height in, the ids that stand for it out.

Each rule is that of a family's processor in `transformers`, in the form in which vLLM puts the ids into the
prompt (the PromptReplacement in its model_executor/models: qwen2_vl.py, qwen3_vl.py, llava.py, gemma3_mm.py,
mistral3.py).
Knows no files, no chats and no image data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tokenization.encoder import TokenIds
from tokenization.image_headers import ImageSize

_ASPECT_MAX = 200


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
    # Pairs of ids that become one where they meet (first, second, both), in this order.
    joins: tuple[tuple[int, int, int], ...] = ()


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
