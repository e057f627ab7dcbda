"""The columns of parsed batches and events: numbers that kernels may close over.

`parse` writes such rows, whoever applies them reads them. A hash is 64 bits: an unsigned number as it is, a
negative one as two's complement, of a digest its last eight bytes, which is how vLLM makes a number of it.
"""

from __future__ import annotations

# Columns of `batches`. FIRST_EVENT and EVENT_COUNT are rows of `events`; a batch that is not OK has none.
# TS_BITS: the float64's bits. RANK: -1 for none, and for a number that is no rank.
STATUS, FIRST_EVENT, EVENT_COUNT, TS_BITS, RANK = range(5)
BATCH_COLUMNS = 5
# Values of STATUS.
OK, BROKEN_BATCH, OVERSIZE = range(3)

# Columns of `events`. What an event does not tell is -1, unless said otherwise here.
(
    KIND,  # see below
    START,  # the event's bytes in `data`, also of OTHER
    END,
    HASH_START,  # its part of `hashes`; a count of 0 where it has none
    HASH_COUNT,
    HAS_PARENT,  # 0 or 1
    PARENT,  # the parent hash's 64 bits; 0 where it has none
    TOKEN_START,  # its part of `tokens`
    TOKEN_COUNT,
    BLOCK_SIZE,  # 0 where it tells none
    LORA_ID,  # only with a name, or 0
    LORA_START,  # the name's bytes in `data`, all ASCII
    LORA_END,
    MEDIUM,  # place in MEDIA; 0 where it tells none
    GROUP,
    SPEC_KIND,  # place in SPEC_KINDS
    WINDOW,  # tokens
) = range(17)
EVENT_COLUMNS = 17
# Values of KIND.
OTHER, STORED, REMOVED, CLEARED = range(4)
# Places of `found`: by KIND how many events are of it, and behind these:
BROKEN_BATCHES = 4
FOUND = 5

MEDIA = ("", "GPU", "CPU", "CPU_PINNED", "DISK", "STORAGE", "EXTERNAL")
SPEC_KINDS = (
    "full_attention",
    "mla_attention",
    "sliding_window",
    "sliding_window_mla",
    "sink_full_attention",
    "chunked_local_attention",
    "mamba",
    "encoder_only_attention",
    "cross_attention",
    "unknown",
)
