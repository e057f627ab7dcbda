"""Time to compute a prompt's block keys: `python -m benchmarks.keys [--json] [--quick] [--rivals]`.

The input is a uint32 buffer of token ids, as from the tokenizer; the output is one chained key per block. The
same run measures the prompt as a Python list, keys with extras in every block, and a floor: one pass over
these bytes by a hash of 8 bytes per step. Figures are medians of single calls with warm caches.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from xxhash import xxh3_64_intdigest

from benchmarks.radix_rival import measure_rival
from benchmarks.report import Options, each_us, read_options
from indexer.keys import BlockHasher

_PROMPTS = ((16_384, 16), (2_048, 16), (131_072, 16), (16_384, 64))
_CALLS = 300


def main() -> int:
    """Measure and print all figures."""
    options = read_options(__doc__, rivals=True)
    options.report.machine()
    for tokens, block_tokens in _PROMPTS:
        _chain(options, tokens, block_tokens)
    _beside(options)
    if options.rivals:
        measure_rival(options, "keys")
    return 0


def _chain(options: Options, tokens: int, block_tokens: int) -> None:
    hasher = BlockHasher(block_tokens, 7)
    prompt = _prompt(tokens)
    root = hasher.root("model")
    setting = {"tokens": tokens, "block_tokens": block_tokens, "input": "uint32", "state": "hot"}
    _report(
        options, f"keys_{tokens}_tokens_block{block_tokens}_us", partial(hasher.chain, root, prompt), setting
    )


def _beside(options: Options) -> None:
    tokens, block_tokens = _PROMPTS[0]
    hasher = BlockHasher(block_tokens, 7)
    prompt = _prompt(tokens)
    ids, root = prompt.tolist(), hasher.root("model")
    extras = [b"image"] * (tokens // block_tokens)
    data = prompt.tobytes()
    setting = {"tokens": tokens, "block_tokens": block_tokens, "state": "hot"}
    name = f"keys_{tokens}_tokens_block{block_tokens}"
    _report(options, f"{name}_list_us", partial(hasher.chain, root, ids), {**setting, "input": "list"})
    _report(options, f"{name}_extras_us", partial(hasher.chain, root, prompt, extras), setting)
    one_pass = {**setting, "what": "xxh3 once over all bytes, no chain, no keys"}
    _report(options, f"{name}_one_pass_us", partial(xxh3_64_intdigest, data), one_pass)


def _report(options: Options, name: str, call: partial[object], setting: dict[str, object]) -> None:
    calls = [call] * options.of_size(_CALLS, 3)
    each_us(calls[:3])
    times = [time for _ in range(options.rounds) for time in each_us(calls)]
    options.report.figure(name, "us", times, **setting)


def _prompt(tokens: int) -> np.ndarray:
    return np.random.default_rng(tokens).integers(0, 128_000, tokens, np.uint32)


if __name__ == "__main__":
    raise SystemExit(main())
