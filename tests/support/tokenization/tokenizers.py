"""Kit of real tokenizers: mistral-common's vocabularies with the families' pre-tokenizers."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers.convert_slow_tokenizer import generate_merges
from transformers.utils import sentencepiece_model_pb2_new as sentencepiece

from benchmarks.large_vocabulary import REGEXES, TEKKEN, byte_level
from tokenization import TINY_DIRECTORY, PromptTokenizer
from tokenization.templates.chat_template import ChatTemplate

SPECIAL = ("<s>", "</s>", "[INST]", "[/INST]", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


@cache
def tokenizer_for(source: str) -> PromptTokenizer:
    """Return the tiny tokenizer with another template."""
    library = Tokenizer.from_file(str(TINY_DIRECTORY / "tokenizer.json"))
    special_tokens = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    return PromptTokenizer(library, ChatTemplate(source, special_tokens), frozenset())


def small() -> Tokenizer:
    """Return the tiny tokenizer with the special tokens of large ones, which loads fast."""
    tokenizer = Tokenizer.from_file(str(TINY_DIRECTORY / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    return tokenizer


@cache
def tekken(file: str = TEKKEN) -> Tokenizer:
    """Return a Mistral tokenizer: byte-level BPE with its own regex."""
    return byte_level(file, REGEXES["tekken"], SPECIAL)


@cache
def of_family(family: str) -> Tokenizer:
    """Return Tekken's vocabulary with another family's pre-tokenizer, which decides where to split."""
    tokenizer = byte_level(TEKKEN, REGEXES.get(family, ""), SPECIAL)
    if family == "gpt-2":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if family == "qwen-2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


@cache
def mistral_v3() -> Tokenizer:
    """Return Mistral's sentencepiece vocabulary as converted by transformers."""
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
