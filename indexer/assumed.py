"""Blocks that this process assumes pods to hold soon; see `speculate`.

They stay beside a shared index, not in it: they are this process's own, end with it, and are asked for and
changed on a request's way, where no server may be waited for.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

from indexer.keys import Keys


class AssumedBlocks:
    """References by pod and block. Thread-safe.

    Args:
        max_entries: Most pairs of (pod, block); what is more is not assumed.
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._entries = 0
        self._lock = threading.Lock()
        self._references: dict[str, Counter[int]] = {}

    def add(self, pod: str, keys: Keys) -> None:
        """Adds one reference for each key."""
        with self._lock:
            references = self._references.setdefault(pod, Counter())
            for key in keys.tolist():
                if key in references:
                    references[key] += 1
                elif self._entries < self._max_entries:
                    references[key] = 1
                    self._entries += 1
            if not references:
                del self._references[pod]

    def remove(self, pod: str, keys: Keys) -> int:
        """Takes one reference away for each key; tells how many blocks are not assumed any more."""
        ended = 0
        with self._lock:
            references = self._references.get(pod, Counter())
            for key in keys.tolist():
                if key not in references:
                    continue
                references[key] -= 1
                if not references[key]:
                    del references[key]
                    ended += 1
            self._entries -= ended
            if not references:
                self._references.pop(pod, None)
        return ended

    def clear_pod(self, pod: str) -> list[int]:
        """Assumes nothing of the pod any more; tells which blocks were."""
        with self._lock:
            keys = list(self._references.pop(pod, ()))
            self._entries -= len(keys)
        return keys

    def positions(self, chain: Sequence[int], pod: str) -> list[int]:
        """Places of those blocks of a chain that the pod is assumed to hold."""
        # Without the lock at first: few pods have something assumed.
        if pod not in self._references:
            return []
        with self._lock:
            assumed = self._references.get(pod, Counter())
            return [position for position, key in enumerate(chain) if key in assumed]
