"""Text to token ids, exactly as the `tokenizers` library encodes it; knows no chat templates.

Engines encode with that library, which takes 10 to 40 times as long as `fastokens`. Any difference would
route prompts by keys that no engine has. So both encode hard texts at load, and a sample of the prompts is
compared behind their answers. What differs is left to the library.
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

# The library reads it at each call. Its threads take part in every call, also in those of a few words, and
# cost more than these do; whoever has set it otherwise means it.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Token ids of a prompt or a part of one: uint32 [tokens].
TokenIds: TypeAlias = NDArray[np.uint32]

CHECK_EVERY = 256  # one prompt in so many is compared with the library
# So many distinct texts with other ids, and the tokenizer's every text is left to the library.
MISMATCHES_MAX = 3

# For text between special tokens that comes again in a conversation's next turn.
_SEGMENT_CACHE_BYTES = 64 << 20
# The library encodes some 3 million characters a second: comparing takes 2 % of a core at most.
_CHECKED_CHARS_PER_S = 64 << 10
_CHECKED_CHARS_MAX = 1 << 20
# By then a prompt is most likely on its way to a pod.
_CHECK_DELAY_S = 0.05
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
    """How a tokenizer's texts are encoded."""

    is_fast: bool  # whether by `fastokens`; else all of them by the library
    checks: int  # texts that both have encoded, to compare the ids
    mismatches: int  # distinct texts that `fastokens` encoded otherwise, or failed on


class FastEncoder:
    """Encodes with `fastokens` and compares it with the library; safe to share between threads."""

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
        if mismatches > MISMATCHES_MAX:  # of the hard texts at load; all was said
            return
        _log.warning(
            "fastokens encodes a text unlike the tokenizers library, which will encode %s from now on; "
            "please report this: chars=%d difference=%s mismatches=%d",
            *("this text" if is_fast else "all texts of this tokenizer", len(text), what, mismatches),
        )


def hard_texts(added_tokens: Sequence[str]) -> list[str]:
    """Return texts of whatever tokenizers treat apart; the same ones at every start."""
    random = Random(0)
    added = random.sample(added_tokens, min(len(added_tokens), _ADDED_TOKENS_MAX))
    parts = (*_HARD_PARTS, *filter(None, added))
    return [
        "".join(random.choices(parts, k=random.randrange(1, _HARD_PARTS_MAX))) for _ in range(_HARD_TEXTS)
    ]


def _digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class TextEncoder:
    """Encodes as the tokenizer does; safe to share between threads.

    Raises:
        TokenizerLoadError: Post-processing is of a kind that is not known.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._head, self._tail = _affixes(tokenizer)
        cutting = _cutting(tokenizer) if is_segmentable(tokenizer) else []
        longest_first = sorted(cutting, key=len, reverse=True)
        self._special_tokens = re.compile("|".join(map(re.escape, longest_first))) if cutting else None
        # Those that what follows may turn into another, longer one.
        self._extensible = {
            token for token in cutting for other in cutting if other != token and other.startswith(token)
        }
        self._fast = FastEncoder.of(tokenizer, self._by_library)

    @property
    def affix_tokens(self) -> tuple[int, int]:
        """How many tokens `add_special_tokens` adds before and behind a text."""
        return len(self._head), len(self._tail)

    @property
    def facts(self) -> EncodingFacts:
        fast = self._fast
        return EncodingFacts(False, 0, 0) if fast is None else fast.facts

    def encode(self, text: str, *, add_special_tokens: bool = False) -> TokenIds:
        """Encode a text.

        Raises:
            UnsupportedPromptError: The text holds half of a surrogate pair.
        """
        ids = None if self._fast is None else self._fast.encode(text)
        if ids is None:
            ids = self._by_library(text)
        if not add_special_tokens:
            return ids
        # Not np.concatenate, which gives up the GIL: to have it back may take longer than to copy.
        return np.frombuffer(bytearray().join((self._head, ids, self._tail)), np.uint32)  # type: ignore[arg-type]

    def closed_prefix(self, text: str) -> str:
        """The part of `text` whose ids are the same whatever follows: up to its last special token."""
        finder = self._special_tokens
        if finder is None:
            return ""
        ends = [found.end() for found in finder.finditer(text) if found.group() not in self._extensible]
        return text[: ends[-1]] if ends else ""

    def _by_library(self, text: str) -> TokenIds:
        try:
            # As a batch: one text alone it encodes with the GIL held.
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        except TypeError as error:  # of a text, what has no UTF-8 form
            raise UnsupportedPromptError("the prompt holds half of a surrogate pair", "prompt") from error
        return _array(encoding.ids)


def is_segmentable(tokenizer: Tokenizer) -> bool:
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


def _depends_on_place(tokenizer: Tokenizer) -> bool:
    """Whether a piece's ids depend on its standing first in the text."""
    part = tokenizer.pre_tokenizer
    # As tokenizer.json writes them; those of a sequence come behind it.
    nodes = [] if part is None else [json.loads(part.__getstate__())]
    for node in nodes:
        if node.get("type") == "Metaspace" and node.get("prepend_scheme") == "first":
            return True
        nodes += node.get("pretokenizers") or []
    return False


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
