"""Encoding by `fastokens`, as long as its token ids are those of the `tokenizers` library.

Engines encode with `tokenizers`, which takes 10 to 40 times as long. Any difference would route prompts by
keys that no engine has. So both encode hard texts at load, and a sample of the prompts is compared behind
their answers. What differs is left to the library.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from random import Random
from typing import NamedTuple, TypeAlias

import fastokens
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tokenization.errors import UnsupportedPromptError

_log = logging.getLogger(__name__)

# Token ids of a prompt or a part of one: uint32 [tokens].
TokenIds: TypeAlias = NDArray[np.uint32]

CHECK_EVERY = 256
"""One prompt in so many is compared with the library."""

MISMATCHES_MAX = 3
"""So many distinct texts with other ids, and the tokenizer's every text is left to the library."""

# For text between special tokens that comes again in a conversation's next turn.
_SEGMENT_CACHE_BYTES = 64 << 20
# The library encodes some 3 million characters a second: comparing takes 2 % of a core at most.
_CHECKED_CHARS_PER_S = 64 << 10
_CHECKED_CHARS_MAX = 1 << 20
# By then a prompt is most likely on its way to a pod.
_CHECK_DELAY_S = 0.05
_LOG_EVERY_S = 60.0
_HARD_TEXTS = 300
_HARD_PARTS_MAX = 80
_ADDED_TOKENS_MAX = 60
# What the families' regexes and normalizers treat apart.
_HARD_PARTS = (
    *"aAbBzZeE019 _-'/.,!?\n\r\t<>|[]{}\0\x85\xa0\u1680\u2028\u3000\u200b\ufeff\u2026\u2581",
    *"\xe9\xdf\xaa\xb2\xbd\u0130\u017f\u01c5\u2177\u212a\u0301\u0416\u044f\u05d0\u0639\u0663\u0903\u0e53\u20dd",
    *"\u3041\u30a2\u4e2d\u6587\ud55c\uff21\ufb01\U0001d400\U0001f600",
    *("  ", "    ", "\r\n", "\n\n", "...", "'s", "'LL", "'\u017f", "e\u0301", "<s>", "</s>"),
    "\U0001f469\u200d\U0001f469\u200d\U0001f467",
)


class EncodingFacts(NamedTuple):
    """How a tokenizer's texts are encoded.

    Attributes:
        is_fast: Whether by `fastokens`; else all of them by the library.
        checks: Texts that both have encoded, to compare the ids.
        mismatches: Distinct texts that `fastokens` encoded otherwise, or failed on.
    """

    is_fast: bool
    checks: int
    mismatches: int


class FastEncoder:
    """Encodes with `fastokens` and compares it with the library; safe to share between threads.

    Args:
        fast: The encoder.
        library: Encodes a text with the library.
        check_every: One text in so many is compared.
    """

    def __init__(
        self, fast: fastokens.Tokenizer, library: Callable[[str], TokenIds], check_every: int = CHECK_EVERY
    ) -> None:
        self._fast = fast
        self._library = library
        self._check_every = check_every
        self._encoded = self._checks = 0
        # Digests, not texts: a prompt may be long, and is nobody else's affair.
        self._differing: frozenset[bytes] = frozenset()
        self._lock = threading.Lock()
        self._is_checking = threading.Lock()
        self._allowed_chars = float(_CHECKED_CHARS_MAX)
        self._allowed_at_s = time.monotonic()
        self._logged_at_s = -_LOG_EVERY_S

    @classmethod
    def of(cls, tokenizer: Tokenizer, library: Callable[[str], TokenIds]) -> FastEncoder | None:
        """Load `fastokens` for a tokenizer and compare hard texts; None where it refuses the tokenizer."""
        try:
            fast = fastokens.Tokenizer.from_json_str(tokenizer.to_str())
        except Exception as error:  # ValueError, but it is a young library
            _log.warning(
                "fastokens refuses a tokenizer, encoding its texts with the tokenizers library, which takes "
                "10 to 40 times as long: error=%s",
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
        """What was found so far."""
        mismatches = len(self._differing)
        return EncodingFacts(mismatches < MISMATCHES_MAX, self._checks, mismatches)

    def encode(self, text: str) -> TokenIds | None:
        """Encode a text without special tokens around it.

        Returns:
            Its ids, which may be written to; None where the library has to encode it.

        Raises:
            UnsupportedPromptError: The text holds half of a surrogate pair.
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
        """Compare texts' ids with the library's, at once."""
        for text in texts:
            ids = self._encode(text)
            if ids is not None:
                self._compare(text, ids)

    def _encode(self, text: str) -> TokenIds | None:
        try:
            ids, _ = self._fast.encode_batch_flat([text])
        except UnicodeEncodeError as error:
            raise UnsupportedPromptError(
                f"the prompt holds half of a surrogate pair at character {error.start}, which no text has",
                "prompt",
            ) from error
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in native code is no Exception
            # Not what it says, which may be the prompt's words.
            self._mismatch(text, f"it raised {type(error).__name__}")
            return None
        # A copy that may be written to: kernels are compiled anew for arrays that may not.
        return np.frombuffer(bytearray(ids), np.uint32)

    def _check_later(self, text: str, ids: TokenIds) -> None:
        """Compare a prompt on another thread, unless one is being compared or enough were of late."""
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
        except RuntimeError:  # there are too many threads
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
            self._mismatch(text, f"{len(ids)} ids unlike the library's {len(expected)}")
        self._checks += 1

    def _mismatch(self, text: str, what: str) -> None:
        digest = _digest(text)
        with self._lock:
            if digest in self._differing:
                return
            self._differing |= {digest}
            is_fast, _, mismatches = self.facts
            now_s = time.monotonic()
            # The last one is said in any case.
            if mismatches != MISMATCHES_MAX and now_s - self._logged_at_s < _LOG_EVERY_S:
                return
            self._logged_at_s = now_s
        _log.warning(
            "fastokens encodes a text unlike the tokenizers library, which will encode %s from now on; "
            "please report this: chars=%d difference=%s mismatches=%d",
            *("this text" if is_fast else "all texts of this tokenizer", len(text), what, mismatches),
        )


def hard_texts(added_tokens: Sequence[str]) -> list[str]:
    """Return texts of whatever tokenizers treat apart; the same ones at every start.

    Args:
        added_tokens: The tokenizer's own, some of which are put in between.
    """
    random = Random(0)
    added = random.sample(added_tokens, min(len(added_tokens), _ADDED_TOKENS_MAX))
    parts = (*_HARD_PARTS, *filter(None, added))
    return [
        "".join(random.choices(parts, k=random.randrange(1, _HARD_PARTS_MAX))) for _ in range(_HARD_TEXTS)
    ]


def _digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
