"""Search for the place where a conversation's prompt leaves its last one, the reason, and the cost.

A session is found by the id that the client sends together with the first user message, else by the last two
messages of its last turn, else by the first user message alone. Without an id, a prompt of a session must
have more messages than the last one: requests that only begin alike are no conversation. No I/O, no clock; of
each session only the keyed hashes of its last prompt's tokens and messages are kept.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from router.analysis.parts import Parts, shown_digest

# Parts that clients change; at the same place as the turn before, the change is called a nonce.
SYSTEM, TOOLS, MESSAGE, EDITED = "system", "tools", "message", "history_edited"
_BYTES_MAX = 64 << 20
_TOKENS_MAX = 1 << 18  # of a prompt; what follows is not compared
_SESSION_BYTES = 2000  # of a session without its tokens and messages
_BREAKS_KEPT = 1000
_PAIRS_TRIED = 16
_SLACK_BLOCKS = 2  # the generation prompt, and tokens that merge with what follows


class Prompt(NamedTuple):
    """A prompt with what is known of its pick."""

    request_id: str
    unix_s: float
    model: str
    scope: int  # distinguishes model, adapter and salt: other scopes share no blocks
    parts: Parts
    tokens: NDArray[np.uint32]
    cached_tokens: int  # at the picked pod
    tokens_per_s: float  # prefill rate of the picked pod


class Break(msgspec.Struct, frozen=True):
    """A prompt that left its session's last one early."""

    session: str
    time: float  # Unix time in seconds
    request_id: str
    model: str
    message: int | None  # first message that differs, from 0; None: none does, or it is not known which
    part: str  # what changed
    offset_tokens: int  # first token that differs
    lost_tokens: int  # tokens that a continued prefix would have had in the cache
    lost_s: float  # seconds of their prefill
    digest: str  # keyed digest of the first tokens that differ


class _Session(msgspec.Struct):
    session: str
    tokens: NDArray[np.uint16]  # keyed hash of each token of the last prompt
    parts: Parts  # of the last prompt
    found_by: tuple[int, ...]
    broken_at: int | None = None  # where the last prompt left the one before it
    turns: int = 0
    breaks: int = 0
    lost_tokens: int = 0
    lost_s: float = 0.0

    @property
    def bytes(self) -> int:
        return self.tokens.nbytes + self.parts.messages.nbytes + _SESSION_BYTES


class PrefixBreaks:
    """Watch over the prompts of all sessions. Not thread-safe, but for `page`.

    Args:
        key: Secret of 16 to 64 bytes, without which a hash tells nothing of the tokens.
        bytes_max: Bound of memory; the session that was idle longest is forgotten first.
    """

    def __init__(self, block_tokens: int, key: bytes, bytes_max: int = _BYTES_MAX) -> None:
        self._block_tokens, self._key = block_tokens, key
        self._multiplier = np.uint32(int.from_bytes(key[:4], "little") | 1)
        self._bytes_max, self._bytes = bytes_max, 0
        self._sessions: OrderedDict[int, _Session] = OrderedDict()
        self._found_by: dict[int, int] = {}
        self._latest: deque[Break] = deque(maxlen=_BREAKS_KEPT)

    def observe(self, prompt: Prompt) -> tuple[int, bool, Break | None]:
        """Record a session's prompt.

        Returns:
            The session, whether it is new, and the break of its prefix, if there is one.
        """
        tokens = (prompt.tokens[:_TOKENS_MAX] * self._multiplier >> np.uint32(16)).astype(np.uint16)
        # Hashes that find the session later: of its last two messages; of its id and first user message.
        parts, scope = prompt.parts, (prompt.scope, prompt.parts.session)
        pair = (hash((*scope, *parts.messages[-2:].tolist())),) if len(parts.messages) > 1 else ()
        first = (hash((*scope, parts.first_user)),) if parts.session or parts.first_user else ()
        names = pair + first
        number = self._number(prompt, names)
        if number is None:
            # An id makes sessions of one first message one; without an id each is one of its own.
            number = hash((*names[-1:], "" if prompt.parts.session else prompt.request_id))
            if number in self._sessions:
                self._forget(number)
            digest, found = shown_digest(repr(number).encode(), self._key), None
            known = _Session(digest, tokens, prompt.parts, names)
        else:
            known = self._forget(number)
            found = self._compared(prompt, known, tokens)
        is_new, known.turns, known.broken_at = not known.turns, known.turns + 1, None
        known.tokens, known.parts, known.found_by = tokens, prompt.parts, names
        if found is not None:
            known.breaks, known.broken_at = known.breaks + 1, found.offset_tokens
            known.lost_tokens += found.lost_tokens
            known.lost_s += found.lost_s
            self._latest.append(found)
        if names:
            self._sessions[number] = known
            self._found_by |= dict.fromkeys(names, number)
            self._bytes += known.bytes
        while self._bytes > self._bytes_max:
            self._forget(next(iter(self._sessions)))
        return number, is_new, found

    def page(self, sessions: int = 200) -> dict[str, Any]:
        """Return the latest breaks, newest first, and the sessions that lost most."""
        known = sorted(self._sessions.copy().values(), key=lambda each: each.lost_tokens, reverse=True)
        shown = "session", "turns", "breaks", "lost_tokens", "lost_s"
        return {
            "breaks": [msgspec.structs.asdict(each) for each in reversed(self._latest.copy())],
            "sessions": [{name: getattr(each, name) for name in shown} for each in known[:sessions]],
        }

    def _number(self, prompt: Prompt, names: tuple[int, ...]) -> int | None:
        """Return the session that a prompt continues."""
        parts, scope = prompt.parts, (prompt.scope, prompt.parts.session)
        first = self._found_by.get(names[-1]) if names else None
        if parts.session and first is not None:
            return first
        messages = parts.messages[-_PAIRS_TRIED - 1 :].tolist()
        for at in range(len(messages) - 2, -1, -1):
            if (pair := self._found_by.get(hash((*scope, *messages[at : at + 2])))) is not None:
                return pair
        if first is None or len(parts.messages) <= len(self._sessions[first].parts.messages):
            return None
        return first

    def _compared(self, prompt: Prompt, last: _Session, tokens: NDArray[np.uint16]) -> Break | None:
        block, shorter = self._block_tokens, min(len(tokens), len(last.tokens))
        offset = _first_difference(tokens, last.tokens)
        lost = shorter // block * block - max(offset // block * block, prompt.cached_tokens)
        if offset >= shorter - _SLACK_BLOCKS * block or lost <= 0:
            return None
        part, message = _cause(last.parts, prompt.parts)
        is_same_place = last.broken_at is not None and abs(offset - last.broken_at) <= block
        if is_same_place and part in (SYSTEM, TOOLS, MESSAGE, EDITED):
            part = "nonce"
        digest = shown_digest(prompt.tokens[offset : offset + block].tobytes(), self._key)
        lost_s = lost / prompt.tokens_per_s if prompt.tokens_per_s > 0.0 else 0.0
        where = prompt.request_id, prompt.model, message, part, offset
        return Break(last.session, prompt.unix_s, *where, lost, lost_s, digest)

    def _forget(self, number: int) -> _Session:
        known = self._sessions.pop(number)
        self._bytes -= known.bytes
        for name in known.found_by:
            if self._found_by.get(name) == number:
                del self._found_by[name]
        return known


def _cause(old: Parts, new: Parts) -> tuple[str, int | None]:
    """Return what changed from one prompt to the next, and the first message that differs."""
    if old.system != new.system:
        return SYSTEM, 0 if old.is_system_first or new.is_system_first else None
    if old.tools != new.tools:
        return TOOLS, None
    if not len(new.messages):
        return "prompt", None
    at = _first_difference(old.messages, new.messages)
    if at == min(len(old.messages), len(new.messages)):
        return "template", None
    last = len(old.messages) - 1
    kept = np.flatnonzero(new.messages == old.messages[last])
    if len(new.messages) <= last or (len(kept) and kept[-1] < last):
        return "history_cut", at
    return (MESSAGE if at == last else EDITED), at


def _first_difference(one: NDArray[Any], other: NDArray[Any]) -> int:
    """Return the first index at which two arrays differ; the shorter one's length if there is none."""
    shorter = min(len(one), len(other))
    differs = one[:shorter] != other[:shorter]
    at = int(differs.argmax()) if shorter else 0
    return at if shorter and differs[at] else shorter
