"""Many pieces encoded at once: pieces in, their encodings out in order, on our own threads where that pays.

The library's own threads take part in every call, also in those of a few words, and cost more than these do.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from tokenizers import Encoding, Tokenizer

# Read by the library at each call; whoever has set it otherwise means it.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# About two milliseconds of work: what is less is not worth another thread's waking up.
_SHARE_CHARS = 8 << 10
_THREADS_MAX = 8


def encode_together(tokenizer: Tokenizer, pieces: Sequence[str]) -> list[Encoding]:
    """Encodes pieces without special tokens, with the GIL given up meanwhile."""
    chars = sum(map(len, pieces))
    if chars <= _SHARE_CHARS:
        return _encode(tokenizer, pieces)
    first, *others = _shares(pieces, chars // _processors())
    running = [_threads().submit(_encode, tokenizer, share) for share in others]
    encodings = _encode(tokenizer, first)
    for future in running:
        encodings += future.result()
    return encodings


def _encode(tokenizer: Tokenizer, pieces: Sequence[str]) -> list[Encoding]:
    # One text the library would encode with the GIL held.
    encodings: list[Encoding] = tokenizer.encode_batch_fast(list(pieces), add_special_tokens=False)
    return encodings


def _shares(pieces: Sequence[str], chars: int) -> Iterator[Sequence[str]]:
    """Cuts the list into parts of at least `chars` characters, but for the last."""
    chars = max(chars, _SHARE_CHARS)
    start = size = 0
    for at, piece in enumerate(pieces):
        size += len(piece)
        if size >= chars:
            yield pieces[start : at + 1]
            start, size = at + 1, 0
    if start < len(pieces):
        yield pieces[start:]


@cache
def _processors() -> int:
    # Not asked each time: that reads a file.
    return min(os.cpu_count() or 1, _THREADS_MAX)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_processors(), "encode")
