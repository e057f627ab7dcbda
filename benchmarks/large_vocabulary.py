"""Tokenizers of current size: byte-level BPE with mistral-common's 130,000 tokens.

The pre-tokenizer's regex is a parameter, so that other model families are covered. Nothing is downloaded.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

TEKKEN = "tekken_240911.json"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
REGEXES = {
    "tekken": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "llama-3": _CONTRACTIONS + _WORDS + r"|\p{N}{1,3}" + _REST,
    "qwen-2": _CONTRACTIONS + _WORDS + r"|\p{N}" + _REST,
}


def qwen_tokenizer() -> Tokenizer:
    """Return a tokenizer of 130,000 tokens that normalizes and splits text as Qwen's does."""
    tokenizer = byte_level(TEKKEN, REGEXES["qwen-2"], ("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def byte_level(file: str, regex: str, special_tokens: Sequence[str]) -> Tokenizer:
    """Return a tokenizer of one of mistral-common's vocabularies behind a split regex."""
    vocabulary, merges = _vocabulary(file)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(regex), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in special_tokens])
    return tokenizer


@cache
def _vocabulary(file: str) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return ids and merges in the alphabet of byte-level BPE; a rank file implies merges by its order."""
    data = json.loads(files("mistral_common.data").joinpath(file).read_text())
    size = data["config"]["default_vocab_size"] - data["config"]["default_num_special_tokens"]
    ranks = {base64.b64decode(entry["token_bytes"]): at for at, entry in enumerate(data["vocab"][:size])}
    letters = bytes_to_unicode()

    def spelt(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = []
    for token in ranks:
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(left, right) for left, right in halves if left in ranks and right in ranks]
        known.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(spelt(left), spelt(right)) for left, right in known]
    return {spelt(token): rank for token, rank in ranks.items()}, merges
