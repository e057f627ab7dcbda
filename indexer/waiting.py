"""Live batches that wait until what is missing in front of them is there: a bounded queue.

Payloads are opaque. When too many wait all are dropped: what was dropped is a gap, and can be replayed.
"""

from __future__ import annotations

from collections import deque

from xxhash import xxh3_128_digest


class WaitingBatches:
    """The live batches of one stream that were not applied yet.

    Args:
        max_batches: Most that wait.
        max_bytes: Most payload bytes that wait.

    Attributes:
        size_bytes: Payload bytes that wait.
    """

    def __init__(self, max_batches: int, max_bytes: int) -> None:
        self.size_bytes = 0
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._batches: deque[tuple[int, bytes]] = deque()
        self._dropped_to = -1

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def first(self) -> tuple[int, bytes | None]:
        """The next one; without a payload where only its number is known, behind those that were dropped."""
        return self._batches[0] if self._batches else (self._dropped_to + 1, None)

    def hold(self, sequence: int, payload: bytes) -> None:
        """Lets one wait; beyond the bounds it is dropped with all others."""
        self._batches.append((sequence, payload))
        self.size_bytes += len(payload)
        if len(self._batches) > self._max_batches or self.size_bytes > self._max_bytes:
            self._drop()
            self._dropped_to = sequence

    def pop(self) -> None:
        """The first one does not wait any more."""
        self.size_bytes -= len(self._batches.popleft()[1])

    def has(self, sequence: int, digest: bytes) -> bool:
        """Whether a batch of this number and XXH3-128 waits."""
        return any(
            number == sequence and xxh3_128_digest(payload) == digest for number, payload in self._batches
        )

    def forget(self) -> None:
        """Drops all, without a gap: they are of a life that is over, or come again."""
        self._drop()
        self._dropped_to = -1

    def _drop(self) -> None:
        self._batches.clear()
        self.size_bytes = 0
