"""What pieces of text became: text in, its token ids out, if they are remembered.

Least recently used pieces go first when the bytes are used up. Not locked: its owner is.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

# Token ids of a prompt or a part of one: uint32 [tokens].
TokenIds: TypeAlias = NDArray[np.uint32]

# Of an array's head and a dict entry with its links, beside text and ids.
_ENTRY_BYTES = 320


class SegmentMemory:
    """Remembers ids by text; a few times cheaper to read than a general cache, which counts here.

    Args:
        capacity_bytes: Most memory for texts and ids together; a piece larger than it is not kept.

    Attributes:
        used_bytes: Memory in use.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.used_bytes = 0
        self._capacity_bytes = capacity_bytes
        self._ids: OrderedDict[str, TokenIds] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ids)

    def get(self, text: str) -> TokenIds | None:
        """The ids of `text`, which counts as used."""
        ids = self._ids.get(text)
        if ids is not None:
            self._ids.move_to_end(text)
        return ids

    def put(self, text: str, ids: TokenIds) -> None:
        """Remembers a piece."""
        size_bytes = _size_bytes(text, ids)
        if size_bytes > self._capacity_bytes or text in self._ids:
            return
        self._ids[text] = ids
        self.used_bytes += size_bytes
        while self.used_bytes > self._capacity_bytes:
            self.used_bytes -= _size_bytes(*self._ids.popitem(last=False))


def _size_bytes(text: str, ids: TokenIds) -> int:
    return sys.getsizeof(text) + ids.nbytes + _ENTRY_BYTES
