"""Encoding piece by piece: text in, the ids of the whole text out, most of them from memory.

A tokenizer cuts text at its special tokens before anything else and encodes what lies between on its own. So
these segments, and within long ones what lies between exact cuts, can be encoded, and remembered, apart: the
next turn of a conversation costs only its new text. Knows no chat templates.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from tokenization.cuts import component, exact_cuts, exact_words
from tokenization.errors import TokenizerLoadError
from tokenization.prefix_memory import Prefix, PrefixMemory
from tokenization.segment_memory import SegmentMemory, TokenIds
from tokenization.shares import encode_together
from tokenization.tries import trie_pattern
from tokenization.words import WORDS_CHARS_MAX, WordEncoder

# Long enough that looking up costs nothing beside encoding, short enough that an edit costs little.
_CHUNK_CHARS = 1024
# A turn's header and its text are one piece; shorter turns share one.
_PIECE_CHARS = 256
# Encoded at once and remembered before the next: another request for the same text meets it half done.
_BATCH_CHARS = 64 << 10
# So many pieces of a long text teach words, which takes about as long again as to encode them.
_LESSONS = 4
# One in so many ids that a view keeps may be of no use.
_VIEWED_SHARE = 8
_NO_IDS: TokenIds = np.zeros(0, np.uint32)


class SegmentEncoder:
    """Encodes exactly as the tokenizer would the whole text; safe to share between threads.

    Args:
        tokenizer: Where cutting it at special tokens is not surely exact, texts are remembered whole.
        capacity_bytes: Most memory for what is remembered; the least recently used goes first.
        piece_chars: Least size of a piece that ends at a special token.
        chunk_chars: Least size of a piece that ends at an exact cut.

    Attributes:
        proof_chars: Enough of what follows a piece to prove that it ends there: a special token, or a space.

    Raises:
        TokenizerLoadError: Post-processing is of a kind that is not known.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        capacity_bytes: int,
        *,
        piece_chars: int = _PIECE_CHARS,
        chunk_chars: int = _CHUNK_CHARS,
    ) -> None:
        self._tokenizer = tokenizer
        self._piece_chars = piece_chars
        self._chunk_chars = chunk_chars
        texts = _cutting(tokenizer) if segmentable(tokenizer) else []
        # Those that what follows may turn into another, longer one.
        self._extensible = {
            token for token in texts for other in texts if other != token and other.startswith(token)
        }
        self._finders = _finders(texts)
        self._cuts = exact_cuts(tokenizer)
        words = exact_words(tokenizer)
        self._words = None if words is None else WordEncoder(tokenizer, words, texts, capacity_bytes // 4)
        self._head, self._tail = _affixes(tokenizer)
        self.proof_chars = max(map(len, texts), default=1)
        self._memory = SegmentMemory(capacity_bytes // 4)
        self._prefixes = PrefixMemory(capacity_bytes // 2)
        self._lock = threading.Lock()

    @property
    def affix_tokens(self) -> tuple[int, int]:
        """How many tokens `add_special_tokens` adds before and behind a text."""
        return len(self._head), len(self._tail)

    def begin(self, text: str, *, add_special_tokens: bool = False) -> Encoding:
        """Looks up what is known of `text`; what is not is left for `Encoding.ids`."""
        with self._lock:
            prefix = self._prefixes.get(text)
        at, known = (0, None) if prefix is None else (prefix.end, prefix.ids)
        pieces = self._pieces(text, at)
        remembers = len(pieces) > 1
        return self._begun(text, known, pieces, add_special_tokens, remembers=remembers)

    def begin_behind(self, known: TokenIds, text: str, *, add_special_tokens: bool = False) -> Encoding:
        """The same for what follows a beginning whose ids are known, see `Encoding.beginning`."""
        return self._begun(text, known, self._pieces(text), add_special_tokens, remembers=False)

    def is_short(self, text: str) -> bool:
        """Whether a text is one piece."""
        return len(text) <= self._chunk_chars

    def ids_between(self, known: TokenIds, text: str, closing: TokenIds) -> TokenIds:
        """Encodes a short text between ids that are known, at once: it is new, and so not looked for.

        Args:
            known: Of a beginning, see `Encoding.beginning`.
            closing: See `closing_ids`.

        Returns:
            The ids of all three.
        """
        return _joined((known, self._encode([text])[0], closing) if text else (known, closing))

    def closing_ids(self, text: str) -> TokenIds | None:
        """The ids that a text has at the end of any other; None where that may not be cut in front of it."""
        if not any(finder.match(text) for finder in self._finders):
            return None
        return self.begin(text).ids()

    def proof(self, text: str, end: int) -> str:
        """What has to follow a piece that ends there, for it to end there in other texts, too."""
        for finder in self._finders:
            if (found := finder.match(text, end)) and found.group() not in self._extensible:
                return found.group()
        return text[end : end + self.proof_chars]

    def closed_prefix(self, text: str) -> str:
        """The part of `text` whose ids are the same whatever follows: up to its last special token."""
        ends = [end for start, end in self._found(text) if text[start:end] not in self._extensible]
        return text[: ends[-1]] if ends else ""

    def remember(self, text: str, end: int, ids: TokenIds) -> None:
        """Remembers the ids of `text[:end]`, which ends with a piece."""
        with self._lock:
            self._prefixes.put(Prefix(text[: end + self.proof_chars], end, ids))

    def encode_pieces(self, pieces: Sequence[str]) -> list[TokenIds]:
        """Encodes pieces, except those that have become known meanwhile, and remembers them."""
        if len(pieces) == 1 and len(pieces[0]) <= self._chunk_chars:
            # To look for it again would cost more than it may save.
            return self._encode_new(pieces)
        done: dict[str, TokenIds] = {}
        for batch in _batches(dict.fromkeys(pieces)):
            with self._lock:
                known = {piece: self._memory.get(piece) for piece in batch}
            unknown = [piece for piece, ids in known.items() if ids is None]
            fresh = zip(unknown, self._encode_new(unknown), strict=True)
            done |= {piece: ids for piece, ids in known.items() if ids is not None} | dict(fresh)
        return [done[piece] for piece in pieces]

    def _encode_new(self, pieces: Sequence[str]) -> list[TokenIds]:
        arrays = self._encode(pieces)
        with self._lock:
            for piece, ids in zip(pieces, arrays, strict=True):
                self._memory.put(piece, ids)
        return arrays

    def _encode(self, pieces: Sequence[str]) -> list[TokenIds]:
        words = self._words
        if words is None:
            return self._by_library(pieces)
        if sum(map(len, pieces)) <= WORDS_CHARS_MAX:
            return [words.encode(piece) for piece in pieces]
        arrays = [words.encode_known(piece) for piece in pieces]
        unknown = [piece for piece, ids in zip(pieces, arrays, strict=True) if ids is None]
        lessons = [piece for piece in unknown if len(piece) <= WORDS_CHARS_MAX][:_LESSONS]
        taught = {piece: words.encode(piece) for piece in lessons}
        others = [piece for piece in unknown if piece not in taught]
        taught |= zip(others, self._by_library(others), strict=True)
        return [taught[piece] if ids is None else ids for piece, ids in zip(pieces, arrays, strict=True)]

    def _by_library(self, pieces: Sequence[str]) -> list[TokenIds]:
        return [_array(encoding.ids) for encoding in encode_together(self._tokenizer, pieces)]

    def _begun(
        self, text: str, known: TokenIds | None, pieces: list[str], special: bool, *, remembers: bool
    ) -> Encoding:
        parts: list[TokenIds | str] = [] if known is None else [known]
        missing_chars = 0
        with self._lock:
            for piece in pieces:
                ids = self._memory.get(piece)
                if ids is None:
                    missing_chars += len(piece)
                    parts.append(piece)
                else:
                    parts.append(ids)
        affixes = (self._head, self._tail) if special else None
        return Encoding(self, text, parts, pieces, missing_chars, affixes, remembers=remembers)

    def _pieces(self, text: str, at: int = 0) -> list[str]:
        """What follows in the text, cut in front of special tokens and at exact cuts, not finer than needed.

        A text's last special token begins a piece of its own: there its next turn goes on.
        """
        pieces: list[str] = []
        found = self._found(text, at)
        for start, _ in found:
            if start - at >= self._piece_chars or (start == found[-1][0] and start > at):
                self._add_chunks(text, at, start, pieces)
                at = start
        if at < len(text):
            self._add_chunks(text, at, len(text), pieces)
        return pieces

    def _found(self, text: str, at: int = 0) -> list[tuple[int, int]]:
        """Where special tokens stand, in their order."""
        found = [match.span() for finder in self._finders for match in finder.finditer(text, at)]
        if len(self._finders) > 1:
            found.sort()
        return found

    def _add_chunks(self, text: str, start: int, end: int, pieces: list[str]) -> None:
        if self._cuts is not None:
            while end - start > self._chunk_chars:
                cut = self._cuts.search(text, start + self._chunk_chars - 1, end)
                if cut is None:
                    break
                pieces.append(text[start : cut.end()])
                start = cut.end()
        pieces.append(text[start:end])


class Encoding:
    """A text whose known pieces are looked up already.

    Attributes:
        text: What is encoded, without what was known in front of it.
        missing_chars: Characters that are still to be encoded.
    """

    __slots__ = (
        *("_affixes", "_arrays", "_encoder", "_ids", "_parts", "_pieces", "_remembers"),
        *("missing_chars", "text"),
    )

    def __init__(
        self,
        encoder: SegmentEncoder,
        text: str,
        parts: list[TokenIds | str],
        pieces: Sequence[str],
        missing_chars: int,
        affixes: tuple[TokenIds, TokenIds] | None,
        *,
        remembers: bool,
    ) -> None:
        self.text = text
        self.missing_chars = missing_chars
        self._encoder = encoder
        self._parts = parts
        self._pieces = pieces
        self._affixes = affixes
        self._remembers = remembers
        self._arrays: Sequence[TokenIds] = ()
        self._ids = _NO_IDS

    def ids(self) -> TokenIds:
        """Encodes what is missing; the array may be shared, do not write to it."""
        missing = [part for part in self._parts if isinstance(part, str)]
        encoded = iter(self._encoder.encode_pieces(missing) if missing else ())
        arrays = [next(encoded) if isinstance(part, str) else part for part in self._parts]
        self._arrays, self._ids = arrays, _joined(arrays)
        if self._remembers:
            end = len(self.text) - len(self._pieces[-1])
            self._encoder.remember(self.text, end, _first(self._ids, len(self._ids) - len(arrays[-1])))
        if self._affixes is None:
            return self._ids
        head, tail = self._affixes
        return _joined((head, self._ids, tail))

    def beginning(self, chars_max: int) -> tuple[int, TokenIds, str] | None:
        """A beginning whose ids are the same in every text that goes on alike; after `ids`.

        Args:
            chars_max: How many characters of the text it may have at most.

        Returns:
            Its length in characters of the text, its ids (of what was known, too), and what every text has to
            go on with; None where there is no such beginning.
        """
        chars, tokens = len(self.text), len(self._ids)
        for piece, ids in zip(reversed(self._pieces), reversed(self._arrays), strict=False):
            chars -= len(piece)
            tokens -= len(ids)
            if chars <= chars_max:
                break
        if not tokens or chars > chars_max:
            return None
        return chars, _first(self._ids, tokens), self._encoder.proof(self.text, chars)


def segmentable(tokenizer: Tokenizer) -> bool:
    """Whether cutting at special tokens is exact for this tokenizer; False where that is in doubt."""
    cutting = _cutting(tokenizer)
    others = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    return bool(cutting) and not _depends_on_place(tokenizer) and not _overlap(cutting, others)


def _cutting(tokenizer: Tokenizer) -> list[str]:
    """Added tokens that are found in the raw text, whatever stands around them."""
    return [
        token.content
        for token in tokenizer.get_added_tokens_decoder().values()
        if token.content and not (token.normalized or token.single_word or token.lstrip or token.rstrip)
    ]


def _finders(tokens: Sequence[str]) -> list[re.Pattern[str]]:
    """Patterns that find the tokens, one for each first letter: one literal beginning is searched fast."""
    by_first: dict[str, list[str]] = {}
    for token in tokens:
        by_first.setdefault(token[0], []).append(token)
    return [re.compile(trie_pattern(group)) for group in by_first.values()]


def _affixes(tokenizer: Tokenizer) -> tuple[TokenIds, TokenIds]:
    """What post-processing puts before and behind every text."""
    whole = tokenizer.encode("a", add_special_tokens=True)
    added = whole.special_tokens_mask
    head = next((at for at, mark in enumerate(added) if not mark), len(added))
    tail = next((at for at, mark in enumerate(reversed(added)) if not mark), 0)
    if whole.ids[head : len(added) - tail] != tokenizer.encode("a", add_special_tokens=False).ids:
        raise TokenizerLoadError(
            "post_processor: does more than to put tokens before and behind a text, which is not supported"
        )
    return _array(whole.ids[:head]), _array(whole.ids[len(added) - tail :])


def _array(ids: list[int]) -> TokenIds:
    return np.frombuffer(array("I", ids), np.uint32)


def _joined(arrays: Sequence[TokenIds]) -> TokenIds:
    # Not np.concatenate, which gives up the GIL: to have it back may take longer than to copy. And writable:
    # kernels are compiled anew for arrays that are not.
    return np.frombuffer(bytearray().join(arrays), np.uint32)  # type: ignore[arg-type]  # they are buffers


def _first(ids: TokenIds, tokens: int) -> TokenIds:
    """The first ids, to be kept: as a view only where that keeps few others in memory."""
    return ids[:tokens] if _VIEWED_SHARE * (len(ids) - tokens) <= tokens else ids[:tokens].copy()


def _batches(pieces: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    chars = 0
    for piece in pieces:
        batch.append(piece)
        chars += len(piece)
        if chars >= _BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def _depends_on_place(tokenizer: Tokenizer) -> bool:
    """Whether a piece's ids depend on its standing first in the text."""
    return any(
        node.get("type") == "Metaspace" and node.get("prepend_scheme") == "first"
        for node in _nodes(component(tokenizer.pre_tokenizer))
    )


def _nodes(node: Any) -> Iterable[dict[str, Any]]:
    if isinstance(node, dict):
        yield node
        for child in node.get("pretokenizers") or []:
            yield from _nodes(child)


def _overlap(cutting: Sequence[str], others: Sequence[str]) -> bool:
    """Whether some text could be cut in two ways: one token's end is another's beginning, or lies within."""
    beginnings = {token[:length] for token in cutting for length in range(1, len(token))}
    beginnings_of_others = {token[:length] for token in others for length in range(1, len(token))}
    ends = {token[-length:] for token in others for length in range(1, len(token))}
    ends_of_cutting = {token[-length:] for token in cutting for length in range(1, len(token))}
    if beginnings & ends or beginnings_of_others & ends_of_cutting:
        return True
    within = re.compile("|".join(map(re.escape, sorted(cutting, key=len, reverse=True))))
    return any((found := within.search(token)) and found.group() != token for token in others)
