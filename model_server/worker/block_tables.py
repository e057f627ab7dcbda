"""Block tables by difference: rank 0 sends each rank the blocks that a table has gained, not the table.

A table grows by one block per sequence every few steps, and has thousands. Blocks that leave a sliding window
are not taken back: no token reads them again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from model_server.attention import Span
from model_server.kv_cache.request import BlockTable, Request, ScheduledRequest

# One sequence of a step: row of its tables, start and length of the span, index of the first new block, and
# the new blocks by KV cache group.
SpanNumbers: TypeAlias = tuple[int, int, int, int, Sequence[Sequence[int]]]


@dataclass(slots=True)
class _Sent:
    """What the ranks know of a request."""

    request: Request
    tables: list[BlockTable]  # those of the request when it was admitted; a preemption takes them away
    row: int
    blocks: int = 0

    @property
    def is_current(self) -> bool:
        return self.request.block_tables is self.tables


class BlockTableChanges:
    """What rank 0 has sent of the tables of running requests, at most `num_rows` of them."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self.clear()

    def clear(self) -> None:
        """Forget what was sent, for example because it may not have arrived."""
        self._sent: dict[str, _Sent] = {}
        self._free = list(range(self._num_rows - 1, -1, -1))

    def take(self, item: ScheduledRequest) -> SpanNumbers:
        """Return the next message about a scheduled request, and count it as sent."""
        request = item.request
        sent = self._sent.get(request.request_id)
        if sent is None or not sent.is_current or sent.request is not request:
            row = self._take_row() if sent is None else sent.row
            sent = self._sent[request.request_id] = _Sent(request, request.block_tables, row)
        first, tables = sent.blocks, request.block_ids
        sent.blocks = len(tables[0])
        return sent.row, item.start, item.num_tokens, first, [table[first:] for table in tables]

    def _take_row(self) -> int:
        if not self._free:
            for request_id, sent in list(self._sent.items()):
                if not sent.is_current:
                    self._free.append(sent.row)
                    del self._sent[request_id]
        return self._free.pop()


class BlockTables:
    """The tables as one rank knows them."""

    def __init__(self, num_groups: int, num_rows: int, num_blocks: int) -> None:
        self._blocks = np.zeros((num_rows, num_groups, num_blocks), np.int32)

    def apply(self, numbers: SpanNumbers) -> Span:
        """Add new blocks to the tables of a row, and return its span."""
        row, start, length, first, added = numbers
        stop = first + len(added[0])
        if stop > first:
            self._blocks[row, :, first:stop] = [np.asarray(blocks, np.int32) for blocks in added]
        return Span(start, length, self._blocks[row, :, : max(stop, 1)])
