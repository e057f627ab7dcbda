"""The prefixes with which most sessions begin, by the space-saving algorithm for heavy hitters. No I/O.

The first prompt of a session counts for the prefix that had been held before it came: what it shares with an
earlier session, such as a system prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from indexer.keys import Keys
from router.analysis.parts import shown_digest

_BLOCKS_MIN, _BLOCKS_MAX = 4, 1 << 14
_SHOWN = 20


class _Prefix(NamedTuple):
    keys: Keys
    sessions: int
    overestimate: int  # sessions of the entry that this one replaced

    @property
    def proven(self) -> int:
        return self.sessions - self.overestimate


class HotPrefixes:
    """Heavy hitters among shared prefixes, in at most 16 MB. Not thread-safe, but for `page`."""

    def __init__(self, block_tokens: int, key: bytes, entries_max: int = 128) -> None:
        self._block_tokens, self._key, self._entries_max = block_tokens, key, entries_max
        self._entries: dict[int, _Prefix] = {}

    def began(self, keys: Keys, held_blocks: int) -> None:
        """Record a new session's prompt, whose first `held_blocks` blocks had been held."""
        if not _BLOCKS_MIN <= held_blocks <= min(len(keys), _BLOCKS_MAX):
            return
        last, sessions = int(keys[held_blocks - 1]), 0
        if (known := self._entries.get(last)) is not None:
            self._entries[last] = known._replace(sessions=known.sessions + 1)
            return
        if len(self._entries) >= self._entries_max:
            rarest = min(self._entries, key=lambda key: self._entries[key].sessions)
            sessions = self._entries.pop(rarest).sessions
        self._entries[last] = _Prefix(keys[:held_blocks].copy(), sessions + 1, sessions)

    def page(self, holders: Callable[[Keys], Sequence[str]]) -> dict[str, list[dict[str, Any]]]:
        """Return the hottest prefixes, with how many sessions are proven to begin with each."""
        shared = [each for each in self._entries.copy().values() if each.proven > 1]
        shared.sort(key=lambda each: each.proven, reverse=True)
        prefixes = [
            {
                "digest": shown_digest(each.keys[-1:].tobytes(), self._key),
                "tokens": len(each.keys) * self._block_tokens,
                "hits": each.proven,
                "pods": list(holders(each.keys)),
            }
            for each in shared[:_SHOWN]
        ]
        return {"prefixes": prefixes}
