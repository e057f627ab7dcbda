"""Real tokenizers as engines load them: mistral-common's vocabularies, the families' pre-tokenizers."""

from __future__ import annotations

import base64
import json
from functools import cache
from importlib.resources import files

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode, generate_merges
from transformers.utils import sentencepiece_model_pb2_new as sentencepiece

SPECIAL = ("<s>", "</s>", "[INST]", "[/INST]", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
REGEXES = {
    "llama-3": _CONTRACTIONS + _WORDS + r"|\p{N}{1,3}" + _REST,
    "qwen-2": _CONTRACTIONS + _WORDS + r"|\p{N}" + _REST,
}


@cache
def tekken(file: str = "tekken_240911.json") -> Tokenizer:
    """A Mistral tokenizer: byte-level BPE with its own regex."""
    return _byte_level(file, _tekken(file)["config"]["pattern"])


@cache
def of_family(family: str) -> Tokenizer:
    """Tekken's vocabulary behind another family's pre-tokenizer, which alone decides where to cut."""
    tokenizer = _byte_level("tekken_240911.json", REGEXES.get(family, ""))
    if family == "gpt-2":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if family == "qwen-2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


@cache
def mistral_v3() -> Tokenizer:
    """Mistral's sentencepiece vocabulary as transformers converts it: no pre-tokenizer, prefix spaces."""
    proto = sentencepiece.ModelProto.FromString(
        files("mistral_common.data").joinpath("mistral_instruct_tokenizer_240323.model.v3").read_bytes()
    )
    vocabulary = {piece.piece: at for at, piece in enumerate(proto.pieces)}
    merges = generate_merges(vocabulary, {piece.piece: piece.score for piece in proto.pieces})
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    controls = [piece.piece for piece in proto.pieces if piece.type == piece.CONTROL]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in controls])
    return tokenizer


@cache
def _tekken(file: str) -> dict[str, object]:
    return json.loads(files("mistral_common.data").joinpath(file).read_text())


@cache
def _vocabulary(file: str) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Ids and merges in the alphabet of byte-level BPE; a rank file tells merges by its order."""
    data = _tekken(file)
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


def _byte_level(file: str, regex: str) -> Tokenizer:
    vocabulary, merges = _vocabulary(file)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(regex), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    return tokenizer
