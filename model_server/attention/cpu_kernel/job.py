"""Arguments of the compiled attention kernel, which torch's threads share."""

import ctypes

TILE_TOKENS = 64  # tokens whose softmax weights are computed together
# Scores of a query head per tile, with padding: they are written four at a time.
SCORES = TILE_TOKENS + 16


class Job(ctypes.Structure):
    """Arguments of the kernel for one layer, shared by its threads."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in (
                "ticket",  # number of work items taken; starts at 0
                "keys",  # address of keys, [blocks, kv_heads, block_tokens, head_dim]
                "values",  # address of values, same layout
                "queries",  # address of [tokens, query_rows, head_dim]; query heads come first
                "output",  # address of [tokens, kv_heads * group, head_dim]
                "tables",  # address of block tables, int32 [sequences, width]; longest last
                "rows",  # address of batch rows, int64 [sequences]
                "begins",  # address of int64 [sequences]: first position, from the first block
                "stops",  # address of int64 [sequences]: end position
                "sequences",
                "width",  # columns of the block tables
                "kv_heads",
                "heads_at_once",  # KV heads per work item: 1 or all, which are read sequentially
                "group",  # query heads per KV head
                "head_dim",  # a multiple of 32
                "block_tokens",
                "query_rows",  # rows per token
            )
        ),
        ("scale", ctypes.c_float),  # factor of scores, which are exponents of 2
    )
