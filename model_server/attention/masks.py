"""Additive causal masks, with or without a window, cut from ones that are made once.

In: rows, columns and a window. Out: a tensor of 0 and -inf. It knows nothing of sequences.
"""

import torch
from torch import Tensor

_FIRST_COLUMNS = 1024


class CausalMasks:
    """Masks of the last rows of a text: what they may attend to depends on the distance from its end alone.

    Args:
        max_rows: Most rows of a mask.
        dtype: Of the masks.
        device: Where they are.
    """

    def __init__(self, max_rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self._max_rows = max_rows
        self._dtype = dtype
        self._device = device
        self._made: dict[int | None, Tensor] = {}

    def corner(self, rows: int, columns: int, window: int | None) -> Tensor:
        """Return the mask of the last `rows` of `columns` tokens: the lower right corner of one shared mask.

        Args:
            rows: At most `max_rows`.
            columns: At least `rows`.
            window: How many tokens a token sees, itself included; None is all before it.
        """
        made = self._made.get(window)
        if made is None or made.shape[1] < columns:
            width = max(columns, _FIRST_COLUMNS if made is None else 2 * made.shape[1])
            made = self._made[window] = self._new(width, window)
        return made[self._max_rows - rows :, made.shape[1] - columns :]

    def _new(self, columns: int, window: int | None) -> Tensor:
        ahead = columns - self._max_rows  # columns before the first row's own
        mask = torch.full((self._max_rows, columns), float("-inf"), device=self._device).triu(ahead + 1)
        if window is not None:
            mask += torch.full_like(mask, float("-inf")).tril(ahead - window)
        return mask.to(self._dtype)
