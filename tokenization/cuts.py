"""Where a long text may be cut so that its parts, encoded apart, give the ids of the whole.

A tokenizer in, a pattern of provably exact cutting places out, or None where that is in doubt. Byte-level BPE
encodes each match of its pre-tokenizer's regex on its own: a place is exact when a match ends there whatever
follows, and the matches before it do not change when the text ends there. Knows no ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from enum import Enum
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models

from tokenization.word_kernels import word_ends

# The regexes of the known families, exactly as their tokenizer.json has them.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN3_5 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Of the packaged tokenizer, see tokenization.tiny.train.
_TINY = r" ?\p{L}+('\p{L}+)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s*\n+|\s+(?!\S)|\s+"
_LINE_FEED_FAMILIES = frozenset({_LLAMA3, _QWEN2, _QWEN3_5, _TEKKEN, _O200K, _TINY})

# Letters and digits to every Unicode version and regex engine: ASCII, Cyrillic, kana, common Han, Hangul.
_WORD = "[0-9A-Za-z\u0410-\u044f\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3]"
_SPACE = r"[ \t\r\n]"
_PUNCTUATION = r"[!-/:-@\[-`{-~]"

# No alternative of any family takes a letter or digit and then white space, nor looks past a letter: a match
# ends between the two, with or without what follows.
_BEFORE_SPACE = f"{_WORD}(?={_SPACE})"
# Where line feeds have an alternative of their own, a run of white space that ends in one is taken by it, or
# by the punctuation in front, up to the last line feed; neither takes a letter or digit.
_AFTER_LINE_FEED = f"\n(?={_WORD})"


class WordCuts(Enum):
    """Cutting places that make words of a text, for `words`.

    A word is white space and what follows it up to the next, if that ends with a letter, a digit or ASCII's
    punctuation: that unless line feeds follow, which some families add to it. What ends otherwise goes on.
    """

    SPACES = "spaces"
    LINES = "lines"
    """White space that ends in a line feed in front of a letter or digit is a word, too."""


def exact_cuts(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """The places where this tokenizer's texts may be cut: behind each match of the pattern."""
    if not _normalizes_in_place(component(tokenizer.normalizer)) or not _plain_bpe(tokenizer.model):
        return None
    regex = _split_regex(component(tokenizer.pre_tokenizer))
    if regex in _LINE_FEED_FAMILIES:
        cuts = re.compile(f"{_BEFORE_SPACE}|{_AFTER_LINE_FEED}")
    elif regex == _GPT2:
        cuts = re.compile(_BEFORE_SPACE)
    else:
        return None
    # Added tokens are found before all this: no cut may go through one, or part it from space that it takes.
    for token in tokenizer.get_added_tokens_decoder().values():
        if token.single_word or token.lstrip or token.rstrip or cuts.search(token.content):
            return None
    return cuts


def exact_words(tokenizer: Tokenizer) -> WordCuts | None:
    """How this tokenizer's texts fall into words whose ids, joined, are the text's; None: not surely."""
    if exact_cuts(tokenizer) is None:
        return None
    regex = _split_regex(component(tokenizer.pre_tokenizer))
    cuts = WordCuts.LINES if regex in _LINE_FEED_FAMILIES else WordCuts.SPACES
    contents = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    # No cut may go through an added token, wherever it is found.
    return None if any(len(split_words(content, cuts)) > 1 for content in contents) else cuts


def split_words(text: str, cuts: WordCuts) -> list[str]:
    """The words of a text without special tokens; joined, they are the text."""
    data = bytearray(text, "utf-8")
    ends = np.empty(len(data), np.int64)
    words = word_ends(np.frombuffer(data, np.uint8), cuts is WordCuts.LINES, ends)
    stops = ends[:words].tolist()
    return [data[start:stop].decode() for start, stop in zip([0, *stops], stops, strict=False)]


def component(part: Any) -> dict[str, Any] | None:
    """A part of a tokenizer (its pre-tokenizer, say) as tokenizer.json writes it; None where it has none."""
    return None if part is None else json.loads(part.__getstate__())


def _normalizes_in_place(normalizer: dict[str, Any] | None) -> bool:
    # What follows a cut is a starter that composes with nothing in front of it, so NFC does not cross it.
    return normalizer is None or normalizer == {"type": "NFC"}


def _plain_bpe(model: models.Model) -> bool:
    return isinstance(model, models.BPE) and not model.dropout


def _split_regex(node: dict[str, Any] | None) -> str | None:
    """The one regex by which the text is split in front of a byte-level BPE; None for any other form."""
    match list(_steps(node)):
        case [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:
            return _GPT2
        case [
            {"type": "Split", "pattern": {"Regex": str(regex)}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ]:
            return regex
        case [
            {"type": "Split", "pattern": {"Regex": str(regex)}, "behavior": "Removed", "invert": True},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ]:
            # Keeps the matches and drops the rest, of which these regexes leave none.
            return regex
    return None


def _steps(node: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if node is None:
        return
    if node.get("type") == "Sequence":
        for child in node.get("pretokenizers") or []:
            yield from _steps(child)
    else:
        yield node
