"""A chat with images, whose ids are known around them: the rendered text and the images in, all ids out.

Knows no HTTP, and nothing of what an image's name means to an engine's cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tokenization.image_headers import ImageSize
from tokenization.image_parts import ImagePart
from tokenization.image_rules import ImageRule, joined
from tokenization.image_urls import size_of_url
from tokenization.segment_memory import TokenIds
from tokenization.segments import Encoding

# To look into an image costs some 50 us.
_SIZES_MAX = 128
# No model has such a context; a client could ask for any number of images.
_IDS_MAX = 4 << 20


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """Where an image's ids stand.

    Attributes:
        offset: Of the first.
        length: How many; they may share an id with the text, or the image, behind.
        uuid: The client's name for it.
    """

    offset: int
    length: int
    uuid: str | None


@dataclass(frozen=True, slots=True)
class ExpandedPrompt:
    """A prompt's ids as far as they are known.

    Attributes:
        ids: All of them, or those in front of the first image that nobody here knows the size of.
        images: Those within `ids`.
        text_tokens: What stands behind `ids` beside images.
        unknown_images: How many images stand behind `ids`.
    """

    ids: TokenIds
    images: tuple[PlacedImage, ...]
    text_tokens: int = 0
    unknown_images: int = 0


class ImagePrompt:
    """One prompt, checked and looked up, its text perhaps not encoded yet.

    Attributes:
        missing_chars: Characters that `expanded` has to encode.
    """

    __slots__ = ("_encoding", "_parts", "_rule", "missing_chars")

    def __init__(self, rule: ImageRule, encoding: Encoding, parts: Sequence[ImagePart]) -> None:
        self._rule = rule
        self._encoding = encoding
        self._parts = parts
        self.missing_chars = encoding.missing_chars

    def expanded(self) -> ExpandedPrompt | None:
        """The prompt with its images; None where its text has other places for images than the images'.

        Engines then fill those that come first, or refuse the prompt.
        """
        ids, parts = self._encoding.ids(), self._parts
        places = np.flatnonzero(ids == self._rule.placeholder_id).tolist()
        if len(places) != len(parts):
            return None
        known: list[TokenIds] = []
        tokens = len(ids)
        for part in parts[: None if not self._rule.reads_size else _SIZES_MAX]:
            expansion = self._rule.expand(self._size(part))
            if expansion is None:
                break
            known.append(expansion)
            tokens += len(expansion)
            if tokens > _IDS_MAX:
                return None
        return self._placed(ids, places, known)

    def _size(self, part: ImagePart) -> ImageSize | None:
        if not self._rule.reads_size:
            return None
        return size_of_url(part.url, upright=self._rule.upright)

    def _placed(self, ids: TokenIds, places: Sequence[int], known: Sequence[TokenIds]) -> ExpandedPrompt:
        """Puts what is known of the first images into their places."""
        pieces: list[TokenIds] = []
        offsets: list[int] = []
        at = tokens = 0
        for place, expansion in zip(places, known, strict=False):
            pieces += ids[at:place], expansion
            offsets.append(tokens + place - at)
            tokens = offsets[-1] + len(expansion)
            at = place + 1
        end = places[len(known)] if len(known) < len(places) else len(ids)
        whole, starts = joined(np.concatenate((*pieces, ids[at:end])), self._rule.joins, offsets)
        images = tuple(
            PlacedImage(start, len(expansion), part.uuid)
            for start, expansion, part in zip(starts, known, self._parts, strict=False)
        )
        unknown = len(places) - len(known)
        return ExpandedPrompt(whole, images, len(ids) - end - unknown, unknown)
