"""What the kernel for single tokens is told, and how much memory it takes.

In: plain numbers. Out: the same, as C has them. It needs no compiler.
"""

import ctypes

TILE_TOKENS = 64  # whose weights are computed at once
# Room for a query head's scores of a tile, which are written four at a time.
SCORES = TILE_TOKENS + 16

_LANES = 16
_PART = 2 * _LANES


class Job(ctypes.Structure):
    """One layer's attention; several threads may work on it.

    Attributes:
        ticket: Parts that somebody has begun; 0 at first.
        keys: Address of the layer's keys, [blocks, kv_heads, block_tokens, head_dim].
        values: Address of its values, likewise.
        queries: Address of [tokens, query_rows, head_dim], of whose rows the first are the query heads.
        output: Address of [tokens, kv_heads * group, head_dim].
        tables: Address of int32 [sequences, width]: blocks; the longest sequences should come last.
        rows: Address of int64 [sequences]: each sequence's token.
        begins: Address of int64 [sequences]: the first position that is read, counted from the first block.
        stops: Address of int64 [sequences]: the position after the last.
        sequences: How many.
        width: Of the block tables.
        kv_heads: Key and value heads.
        heads_at_once: KV heads that are one part of the work, 1 or all. All of a block's are read in one go.
        group: Query heads of a KV head.
        head_dim: Elements of a head, an even number.
        block_tokens: Tokens in a block.
        query_rows: Of a token.
        scale: Of the exponents of 2 that scores are.
    """

    _fields_ = (
        ("ticket", ctypes.c_int64),
        ("keys", ctypes.c_int64),
        ("values", ctypes.c_int64),
        ("queries", ctypes.c_int64),
        ("output", ctypes.c_int64),
        ("tables", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("begins", ctypes.c_int64),
        ("stops", ctypes.c_int64),
        ("sequences", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("heads_at_once", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("block_tokens", ctypes.c_int64),
        ("query_rows", ctypes.c_int64),
        ("scale", ctypes.c_float),
    )


def scratch_bytes(query_heads: int, head_dim: int) -> int:
    """Return how much of a thread's stack the kernel takes for `heads_at_once * group` query heads."""
    return 4 * query_heads * (2 * padded(head_dim) + SCORES + 2 * _LANES + 1)


def padded(head_dim: int) -> int:
    """Return how many elements a head takes in the kernel's memory: whole parts."""
    return (head_dim + _PART - 1) // _PART * _PART
