"""Encoder from text to token ids, with the same ids as the `tokenizers` library that engines use.

`fastokens` is 10 to 40 times as fast as that library. A different id would give keys that no engine has.
Therefore both encode hard texts at load, and a sample of prompts is compared in the background. Texts with
different ids are encoded by the library.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b
from random import Random
from typing import NamedTuple, TypeAlias

import fastokens
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tokenization.errors import TokenizerLoadError, UnsupportedPromptError

_log = logging.getLogger(__name__)

# Read by the library at each call. Its threads take part even in calls of a few words, for which they cost
# more than they save. A value set by the user is kept.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Token ids of a prompt or a part of one: uint32 [tokens].
TokenIds: TypeAlias = NDArray[np.uint32]

CHECK_EVERY = 256  # one of this many prompts is compared with the library
# Number of distinct texts with different ids after which the library encodes all texts.
MISMATCHES_MAX = 3

# Cache of text between special tokens, which the next turn of a conversation repeats.
_SEGMENT_CACHE_BYTES = 64 << 20
# The library encodes about 3 million characters per second, so comparing takes at most 2 % of a core.
_CHECKED_CHARS_PER_S = 64 << 10
_CHECKED_CHARS_MAX = 1 << 20
# Delays the comparison until the prompt has most likely been sent to a pod.
_CHECK_DELAY_S = 0.05
_HARD_TEXTS = 300
_HARD_PARTS_MAX = 80
_ADDED_TOKENS_MAX = 60
# Characters that regexes and normalizers of the model families treat specially.
_HARD_PARTS = (
    *"aAbBzZeE019 _-'/.,!?\n\r\t<>|[]{}\0\x85\xa0\u1680\u2028\u3000\u200b\ufeff\u2026\u2581",
    *"\xe9\xdf\xaa\xb2\xbd\u0130\u017f\u01c5\u2177\u212a\u0301\u0416\u044f\u05d0\u0639\u0663\u0903\u0e53\u20dd",
    *"\u3041\u30a2\u4e2d\u6587\ud55c\uff21\ufb01\U0001d400\U0001f600",
    *("  ", "    ", "\r\n", "\n\n", "...", "'s", "'LL", "'\u017f", "e\u0301", "<s>", "</s>"),
    "\U0001f469\u200d\U0001f469\u200d\U0001f467",
)


class EncodingFacts(NamedTuple):
    """State of a tokenizer's fast encoder."""

    is_fast: bool  # whether `fastokens` is used; else the library encodes all texts
    checks: int  # texts compared so far
    mismatches: int  # distinct texts that `fastokens` encoded differently or failed on


class FastEncoder:
    """Encoder with `fastokens`, compared with the library on samples. Thread-safe."""

    def __init__(
        self, fast: fastokens.Tokenizer, library: Callable[[str], TokenIds], check_every: int = CHECK_EVERY
    ) -> None:
        self._fast = fast
        self._library = library
        self._check_every = check_every
        self._encoded = self._checks = 0
        # Digests instead of texts, because prompts may be long and are private.
        self._differing: frozenset[bytes] = frozenset()
        self._lock = threading.Lock()
        self._is_checking = threading.Lock()
        self._allowed_chars = float(_CHECKED_CHARS_MAX)
        self._allowed_at_s = time.monotonic()

    @classmethod
    def create(cls, tokenizer: Tokenizer, library: Callable[[str], TokenIds]) -> FastEncoder | None:
        """Load `fastokens` for a tokenizer and compare hard texts; None if it rejects the tokenizer."""
        try:
            fast = fastokens.Tokenizer.from_json_str(tokenizer.to_str())
        except Exception as error:  # documented: ValueError; the library is new, so any other as well
            _log.warning(
                "tokenizer not supported by fastokens, using the tokenizers library, which takes 10 to 40 "
                "times as long: error=%s",
                error,
            )
            return None
        fast.enable_segment_cache(_SEGMENT_CACHE_BYTES)
        encoder = cls(fast, library)
        added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
        encoder.compare(hard_texts(added))
        return encoder

    @property
    def facts(self) -> EncodingFacts:
        mismatches = len(self._differing)
        return EncodingFacts(mismatches < MISMATCHES_MAX, self._checks, mismatches)

    def encode(self, text: str) -> TokenIds | None:
        """Encode a text without special tokens around it.

        Returns:
            Its ids, in a writable array; None if the library has to encode the text.

        Raises:
            UnsupportedPromptError: The text contains a lone surrogate.
        """
        differing = self._differing
        if differing and (len(differing) >= MISMATCHES_MAX or _digest(text) in differing):
            return None
        ids = self._encode(text)
        self._encoded += 1
        if ids is not None and self._encoded % self._check_every == 0:
            self._check_later(text, ids)
        return ids

    def compare(self, texts: Sequence[str]) -> None:
        """Compare the ids of texts with the library's, in this thread."""
        for text in texts:
            ids = self._encode(text)
            if ids is not None:
                self._compare(text, ids)

    def _encode(self, text: str) -> TokenIds | None:
        try:
            ids, _ = self._fast.encode_batch_flat([text])
        except UnicodeEncodeError as error:
            raise UnsupportedPromptError(
                f"the prompt contains a lone surrogate at character {error.start}, which is not valid text",
                "prompt",
            ) from error
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in native code is no Exception
            # Without the error's text, which may quote the prompt.
            self._mismatch(text, f"it raised {type(error).__name__}")
            return None
        # A writable copy, because kernels would be compiled separately for read-only arrays.
        return np.frombuffer(bytearray(ids), np.uint32)

    def _check_later(self, text: str, ids: TokenIds) -> None:
        """Compare a prompt in a background thread, unless one is being compared or the rate is too high."""
        if not self._is_checking.acquire(blocking=False):
            return
        now_s = time.monotonic()
        allowed = self._allowed_chars + (now_s - self._allowed_at_s) * _CHECKED_CHARS_PER_S
        self._allowed_chars, self._allowed_at_s = min(allowed, _CHECKED_CHARS_MAX), now_s
        if len(text) > self._allowed_chars:
            self._is_checking.release()
            return
        self._allowed_chars -= len(text)
        thread = threading.Thread(target=self._check, args=(text, ids), name="encoding-check", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the thread limit is reached
            self._is_checking.release()

    def _check(self, text: str, ids: TokenIds) -> None:
        try:
            time.sleep(_CHECK_DELAY_S)
            self._compare(text, ids)
        finally:
            self._is_checking.release()

    def _compare(self, text: str, ids: TokenIds) -> None:
        expected = self._library(text)
        if not np.array_equal(ids, expected):
            self._mismatch(text, f"{len(ids)} ids, the library has {len(expected)}")
        self._checks += 1

    def _mismatch(self, text: str, what: str) -> None:
        digest = _digest(text)
        with self._lock:
            if digest in self._differing:
                return
            self._differing |= {digest}
            is_fast, _, mismatches = self.facts
        if mismatches > MISMATCHES_MAX:  # further hard texts at load; already logged
            return
        _log.warning(
            "fastokens and the tokenizers library disagree, the library encodes %s from now on; please "
            "report this: chars=%d difference=%s mismatches=%d",
            *("this text" if is_fast else "all texts of this tokenizer", len(text), what, mismatches),
        )


def hard_texts(added_tokens: Sequence[str]) -> list[str]:
    """Return texts of characters that tokenizers treat specially; the same ones at every start."""
    random = Random(0)
    added = random.sample(added_tokens, min(len(added_tokens), _ADDED_TOKENS_MAX))
    parts = (*_HARD_PARTS, *filter(None, added))
    return [
        "".join(random.choices(parts, k=random.randrange(1, _HARD_PARTS_MAX))) for _ in range(_HARD_TEXTS)
    ]


def _digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class TextEncoder:
    """Encoder with the same ids as a tokenizer. Thread-safe.

    Raises:
        TokenizerLoadError: The tokenizer's post-processing is not supported.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._head, self._tail = _affixes(tokenizer)
        # Numbers of tokens that `add_special_tokens` adds before and after a text.
        self.affix_tokens = len(self._head), len(self._tail)
        splitting = _splitting_tokens(tokenizer)
        self._special_tokens = _any_of(splitting)
        # Special tokens that are a prefix of another one, so that following text may change them.
        self._extensible = {
            token for token in splitting for other in splitting if other != token and other.startswith(token)
        }
        self._fast = FastEncoder.create(tokenizer, self._by_library)

    @property
    def facts(self) -> EncodingFacts:
        fast = self._fast
        return EncodingFacts(False, 0, 0) if fast is None else fast.facts

    def encode(self, text: str, *, add_special_tokens: bool = False) -> TokenIds:
        """Encode a text.

        Raises:
            UnsupportedPromptError: The text contains a lone surrogate.
        """
        ids = None if self._fast is None else self._fast.encode(text)
        if ids is None:
            ids = self._by_library(text)
        if not add_special_tokens:
            return ids
        # Not np.concatenate, which releases the GIL; to acquire it again may take longer than the copy.
        return np.frombuffer(bytearray().join((self._head, ids, self._tail)), np.uint32)  # type: ignore[arg-type]

    def stable_prefix(self, text: str) -> str:
        """Return the prefix of `text` up to its last special token; its ids are the same whatever follows."""
        tokens = self._special_tokens.finditer(text)
        ends = [found.end() for found in tokens if found.group() not in self._extensible]
        return text[: ends[-1]] if ends else ""

    def _by_library(self, text: str) -> TokenIds:
        try:
            # Encode as a batch, because the library holds the GIL while it encodes a single text.
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        except TypeError as error:  # the text has no UTF-8 form
            raise UnsupportedPromptError("the prompt contains a lone surrogate", "prompt") from error
        return _array(encoding.ids)


def _splitting_tokens(tokenizer: Tokenizer) -> list[str]:
    """Return the added tokens at which texts may be split without changing the ids; empty if in doubt."""
    added = tokenizer.get_added_tokens_decoder().values()
    # Matched in the raw text, independent of the text around them.
    splitting = [
        token.content
        for token in added
        if token.content and not (token.normalized or token.single_word or token.lstrip or token.rstrip)
    ]
    is_exact = not _depends_on_position(tokenizer) and not _overlap(splitting, [one.content for one in added])
    return splitting if is_exact else []


def _any_of(tokens: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern of these tokens, the longest first; it matches nothing if there are none."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)")


def _affixes(tokenizer: Tokenizer) -> tuple[TokenIds, TokenIds]:
    """Return the tokens that post-processing adds before and after every text."""
    whole = tokenizer.encode("a", add_special_tokens=True)
    added = whole.special_tokens_mask
    head = next((at for at, mark in enumerate(added) if not mark), len(added))
    tail = next((at for at, mark in enumerate(reversed(added)) if not mark), 0)
    if whole.ids[head : len(added) - tail] != tokenizer.encode("a", add_special_tokens=False).ids:
        raise TokenizerLoadError(
            "post_processor: unsupported, does more than add tokens before and after a text"
        )
    return _array(whole.ids[:head]), _array(whole.ids[len(added) - tail :])


def _array(ids: list[int]) -> TokenIds:
    return np.frombuffer(array("I", ids), np.uint32)


def _depends_on_position(tokenizer: Tokenizer) -> bool:
    """Return whether a piece's ids depend on its being the first of the text."""
    part = tokenizer.pre_tokenizer
    # In the form of tokenizer.json; members of a sequence are appended after it.
    nodes = [] if part is None else [json.loads(part.__getstate__())]
    for node in nodes:
        if node.get("type") == "Metaspace" and node.get("prepend_scheme") == "first":
            return True
        nodes += node.get("pretokenizers") or []
    return False


def _overlap(splitting: Sequence[str], others: Sequence[str]) -> bool:
    """Return whether some text could be split in two ways, because one token overlaps or contains another."""
    beginnings = {token[:length] for token in splitting for length in range(1, len(token))}
    beginnings_of_others = {token[:length] for token in others for length in range(1, len(token))}
    ends = {token[-length:] for token in others for length in range(1, len(token))}
    ends_of_cutting = {token[-length:] for token in splitting for length in range(1, len(token))}
    if beginnings & ends or beginnings_of_others & ends_of_cutting:
        return True
    within = _any_of(splitting)
    return any((found := within.search(token)) and found.group() != token for token in others)
