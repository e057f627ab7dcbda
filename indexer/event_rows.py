"""The columns of decoded events: numbers that kernels may close over.

`event_columns` writes such rows, whoever applies them reads them. A hash is 64 bits: an unsigned number as it
is, a negative one as two's complement, of a digest its last eight bytes, which is how vLLM makes a number of
it.
"""

from __future__ import annotations

(
    KIND,  # see below
    HASH_START,  # its part of `hashes`; a count of 0 where it has none
    HASH_COUNT,
    HAS_PARENT,  # 0 or 1
    PARENT,  # the parent hash's 64 bits; 0 where it has none
    TOKEN_START,  # its part of `tokens`
    TOKEN_COUNT,
    BLOCK_SIZE,  # 0 where it tells none
    HAS_LORA,  # 0 or 1
    MEDIUM,  # place in MEDIA; 0 where it tells none
    GROUP,  # -1 where it tells none
    SPEC_KIND,  # place in SPEC_KINDS; -1 where it tells none
) = range(12)
EVENT_COLUMNS = 12
# Values of KIND. OTHER is left to whoever reads typed events.
OTHER, STORED, REMOVED, CLEARED = range(4)

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
