"""One list-and-watch loop: keeps a mirror of one kind's objects, on a thread of its own.

What a clean end of a watch leaves is gone on from; after anything else the whole is listed again, and taken
over only when it is complete, so that a relist never shows less than there is.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from threading import Condition, Thread
from typing import Generic, TypeVar

from router.errors import ClusterError
from router.kube.client import Kind, KubeClient, WatchStream
from router.kube.mirror import Listing, Mirror, RelistError

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

_WAIT_MIN_S, _WAIT_MAX_S = 0.2, 10.0
# Of a kind that need not exist: how often it is looked for.
_ABSENT_S = 30.0
_SHORTEST_S = 0.5
_STOP_S = 2.0
_NOT_FOUND, _GONE, _FORBIDDEN = 404, 410, 403
_KEEPS_CREDENTIALS = frozenset({_NOT_FOUND, _GONE, _FORBIDDEN})


@dataclass(frozen=True, slots=True)
class WatchState:
    """How a watch goes.

    Attributes:
        listed: Whether the objects were ever listed in full.
        absent: Whether the kind does not exist, and need not.
        error: Why it fails now; None while it does not.
        lists: How often the whole was listed, by why.
        contact_s: When the server was heard last.
        group: Of the kind that is watched.
    """

    listed: bool = False
    absent: bool = False
    error: ClusterError | None = None
    lists: tuple[tuple[str, int], ...] = ()
    contact_s: float = -1.0
    group: str = ""


class Reflector(Generic[_T]):
    """Watches until closed.

    Args:
        name: What is watched, for people.
        mirror: What is kept.
        changed: Told on this object's thread whenever the mirror or the state changed.
        deadline_s: A watch that is silent for so long is taken for dead.
        optional: Whether the kind need not exist.
    """

    def __init__(
        self,
        name: str,
        client: KubeClient,
        mirror: Mirror[_T],
        changed: Callable[[], None],
        *,
        deadline_s: float,
        optional: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.state = WatchState()
        self.mirror = mirror
        self._client = client
        self._changed = changed
        self._deadline_s = deadline_s
        self._optional = optional
        self._clock = clock
        self._wake = Condition()
        # Guarded by it: what is asked for, which turn that was, and the connection that is read.
        self._kinds: Sequence[Kind] = ()
        self._turn = 0
        self._stream: WatchStream | None = None
        self._closing = False
        self._thread = Thread(target=self._run, name=f"kube-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends it; idempotent."""
        self._ask_for((), closing=True)
        if self._thread.is_alive():
            # One that waits for a server that is half dead ends with the process.
            self._thread.join(_STOP_S)

    def follow(self, *kinds: Kind) -> None:
        """Says what to watch: the first of these kinds that exists; none: nothing, and the mirror is cleared.

        What was known stays until the new list is complete. Never blocks.
        """
        if kinds != tuple(self._kinds):
            self._ask_for(kinds)

    def _ask_for(self, kinds: Sequence[Kind], *, closing: bool = False) -> None:
        with self._wake:
            self._kinds, self._turn = kinds, self._turn + 1
            self._closing = self._closing or closing
            if self._stream is not None:
                self._stream.stop()
            self._wake.notify_all()

    def _run(self) -> None:
        wait_s, why = _WAIT_MIN_S, "start"
        while True:
            with self._wake:
                turn, kinds = self._turn, self._kinds
                if self._closing:
                    return
                if not kinds:
                    self._forget()
                    self._pause(turn, None)
                    why = "asked"
                    continue
            began_s = self._clock()
            try:
                kind = self._list(kinds, why, turn)
                if kind is None:
                    self._pause(turn, _ABSENT_S)
                    continue
                while self._current(turn):
                    # The server's own end: the version is good to go on from.
                    self._watch(kind, turn, short=kind is not kinds[0])
                    if kind is not kinds[0]:
                        break
                why = "ended"
            except (ClusterError, RelistError) as error:
                if not self._current(turn):
                    why = "asked"
                    continue
                why = self._failed(error)
                lived = self._clock() - began_s > _WAIT_MAX_S
                wait_s = _WAIT_MIN_S if lived else min(2 * wait_s, _WAIT_MAX_S)
                self._pause(turn, wait_s * random.uniform(0.5, 1.0))
            except Exception:
                _log.exception("watch of %s; it begins anew", self.name)
                why = "internal_error"
                self._pause(turn, _WAIT_MAX_S)

    def _list(self, kinds: Sequence[Kind], why: str, turn: int) -> Kind | None:
        """Takes over a full list; answers of which kind, None if there is none of them."""
        for kind in kinds:
            listing, version = self.mirror.listing(), ""
            try:
                for page in self._client.pages(kind):
                    listing.add(page.items or ())
                    version = page.metadata.resource_version
            except ClusterError as error:
                if error.status == _NOT_FOUND and (self._optional or kind is not kinds[-1]):
                    continue
                raise
            self._take(turn, listing, version, why, kind)
            return kind
        self._take(turn, self.mirror.listing(), "", why, None)
        return None

    def _take(self, turn: int, listing: Listing[_T], version: str, why: str, kind: Kind | None) -> None:
        with self._wake:
            if turn != self._turn:
                return
            self.mirror.replace(listing, version)
        counts = dict(self.state.lists)
        counts[why] = counts.get(why, 0) + 1
        self.state = WatchState(
            listed=True,
            absent=kind is None,
            lists=tuple(counts.items()),
            contact_s=self._clock(),
            group=kind.group if kind is not None else "",
        )
        self._changed()

    def _watch(self, kind: Kind, turn: int, *, short: bool) -> None:
        """Follows events until the server ends the watch."""
        lasts_s = min(self._deadline_s, _ABSENT_S if short else self._deadline_s) * random.uniform(0.5, 0.8)
        began_s = self._clock()
        stream = self._client.watch(kind, self.mirror.version, lasts_s=lasts_s, silent_s=self._deadline_s)
        try:
            with self._wake:
                if turn != self._turn:
                    return
                self._stream = stream
            for event in stream:
                with self._wake:
                    if turn != self._turn:
                        return
                    news = self.mirror.apply(event)
                self.state = replace(self.state, contact_s=self._clock(), error=None)
                if news:
                    self._changed()
            self.state = replace(self.state, contact_s=self._clock(), error=None)
        finally:
            with self._wake:
                self._stream = None
            stream.close()
        if self._clock() - began_s < _SHORTEST_S:
            # Who ends it again and again must not keep us, and itself, busy.
            self._pause(turn, _SHORTEST_S)

    def _failed(self, error: Exception) -> str:
        """Notes why, and answers it in a word."""
        is_gone = isinstance(error, ClusterError) and error.status == _GONE
        if is_gone or not isinstance(error, ClusterError):
            _log.info("%s are listed again: %s", self.name, error)
            return "gone" if is_gone else "failed"
        if error.status not in _KEEPS_CREDENTIALS:
            try:
                self._client.renew()
            except ClusterError as unreadable:
                error = unreadable
        self.state = replace(self.state, error=error)
        self._changed()
        return "failed"

    def _forget(self) -> None:
        self.mirror.clear()
        self.state = WatchState()
        self._changed()

    def _current(self, turn: int) -> bool:
        with self._wake:
            return turn == self._turn and not self._closing

    def _pause(self, turn: int, wait_s: float | None) -> None:
        """Waits, but not longer than until something else is asked for."""
        with self._wake:
            self._wake.wait_for(lambda: self._turn != turn, wait_s)
