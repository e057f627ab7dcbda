"""One stream's view on its way to a peer: listed part by part, while what the stream says waits.

So the list and the sequence number belong together, no other stream waits, and nobody holds a lock for longer
than a part takes. Runs on the subscriber's thread only; who asked waits for a future on a thread of its own.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

from indexer.errors import PeerError
from indexer.streams.actions import Batch
from indexer.streams.state_machine import StreamMachine, StreamState
from indexer.views.view_parts import ViewContent, ViewPart, ViewSnapshot

_log = logging.getLogger(__name__)

# Between two parts, so that readers have the index's lock, and other threads the interpreter.
_TURN_S = 0.0005
# While a view is listed so much may wait of its stream; beyond it the list is given up.
_HELD_BATCHES_MAX = 2048
_HELD_BYTES_MAX = 8 << 20


class ViewExports:
    """At most one list of a view at a time, and the live batches that wait for its end."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes  # a view that takes more is not told
        self._told: Future[ViewSnapshot] | None = None
        self._turns: Iterator[ViewSnapshot | None] = iter(())
        self._turn_s = math.inf
        self.held: deque[Batch] = deque()
        self._held_bytes = 0

    @property
    def running(self) -> bool:
        return self._told is not None

    @property
    def holds(self) -> bool:
        """Whether live batches must wait: the view is listed, or others wait since it was."""
        return self.running or bool(self.held)

    @property
    def due_s(self) -> float:
        """When `turn` must be called next, or the batches that waited be taken."""
        return self._turn_s if self.running else -math.inf if self.held else math.inf

    def begin(
        self, told: Future[ViewSnapshot], mark: tuple[int, bytes], content: ViewContent, now_s: float
    ) -> None:
        """Begins to list a view.

        Args:
            told: Gets the snapshot, or a PeerError.
            mark: Number and digest of the last batch in the view.

        Raises:
            PeerError: It is being listed already.
        """
        if self.holds:
            raise PeerError("busy", "the view is being listed for another peer")
        self._told, self._turns, self._turn_s = told, self._list(mark, content), now_s

    def turn(self, now_s: float) -> None:
        told = self._told
        if told is None or now_s < self._turn_s:
            return
        if told.cancelled():
            self.abort("given_up", "nobody waits for it any more")
            return
        self._turn_s = now_s + _TURN_S
        try:
            snapshot = next(self._turns)
        except Exception:
            _log.exception("a view could not be listed for a peer")
            self.abort("internal_error", "see the log")
        else:
            if snapshot is not None:
                self._told = None
                if told.set_running_or_notify_cancel():
                    told.set_result(snapshot)

    def abort(self, reason: str, message: str) -> None:
        """Gives the list up, if one is being made; what waited still waits."""
        told, self._told = self._told, None
        if told is not None and told.set_running_or_notify_cancel():
            told.set_exception(PeerError(reason, message))

    def hold(self, batches: Sequence[Batch]) -> bool:
        """Lets live batches wait; False: too many wait, and all of them must be taken now."""
        self.held.extend(batches)
        self._held_bytes += sum(len(batch.payload) for batch in batches)
        if len(self.held) <= _HELD_BATCHES_MAX and self._held_bytes <= _HELD_BYTES_MAX:
            return True
        self.abort("busy", "the stream says too much for its view to be listed")
        return False

    def take(self, most: int | None = None) -> list[Batch]:
        """The oldest batches that waited; None: all of them."""
        number = len(self.held) if most is None else min(most, len(self.held))
        batches = [self.held.popleft() for _ in range(number)]
        self._held_bytes -= sum(len(batch.payload) for batch in batches)
        return batches

    def _list(self, mark: tuple[int, bytes], content: ViewContent) -> Iterator[ViewSnapshot | None]:
        parts: list[ViewPart] = []
        size_bytes = 0
        for part in content.parts:
            if part is not None:
                parts.append(part)
                size_bytes += sum(column.nbytes for column in part.blocks)
            if size_bytes > self._max_bytes:
                self.abort("too_large", f"the view takes more than {self._max_bytes} bytes")
            yield None
        yield ViewSnapshot(*mark, content.facts, content.evicted_blocks, parts)


def mark_of(machine: StreamMachine) -> tuple[int, bytes]:
    """Number and digest of the last batch in a view that may be told to peers.

    Raises:
        PeerError: It may not.
    """
    mark, state = machine.mark, machine.state
    if mark is not None:
        return mark
    if state is StreamState.EXACT:
        raise PeerError("unproven", "no batch was applied that could show whose view it is")
    raise PeerError(state.lower(), f"its view is {state} ({machine.reason})")
