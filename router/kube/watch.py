"""One list-and-watch loop: keeps a mirror of one kind's objects, on a thread of its own.

What a clean end of a watch leaves is gone on from; after anything else the whole is listed again, and taken
over only when it is complete, so that a relist never shows less than there is.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Condition, Thread
from typing import Any, Generic, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.errors import ClusterError
from router.kube.client import Kind, KubeClient, WatchStream
from router.kube.mirror import GONE, Mirror

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

_OURS = "kvroute_discovery_"
_WAIT_MIN_S, _WAIT_MAX_S = 0.2, 10.0
# Of a kind that need not exist: how often it is looked for.
_ABSENT_S = 30.0
_SHORTEST_S = 0.5
_STOP_S = 2.0
_NOT_FOUND, _FORBIDDEN = 404, 403
_KEEPS_CREDENTIALS = frozenset({_NOT_FOUND, GONE, _FORBIDDEN})
_UNREADABLE_SHOWN = 10


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
    lists: Mapping[str, int] = field(default_factory=dict)
    contact_s: float = -1.0
    group: str = ""


class Reflector(Generic[_T]):
    """Watches until closed.

    Args:
        name: What is watched, for people.
        mirror: What is kept, empty.
        changed: Told on this object's thread whenever the mirror or the state changed.
        deadline_s: A watch that is silent for so long is taken for dead.
        optional: Whether the kind need not exist.

    Attributes:
        mirror: What is known now; each is never changed, but replaced.
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
    ) -> None:
        self.name = name
        self.state = WatchState()
        self.mirror = mirror
        self._client = client
        self._changed = changed
        self._deadline_s = deadline_s
        self._optional = optional
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

    def shown(self) -> dict[str, Any]:
        state, mirror = self.state, self.mirror
        return {
            "group": state.group,
            "listed": state.listed,
            "absent": state.absent,
            "objects": len(mirror.objects),
            "unreadable": dict(list(mirror.problems.items())[:_UNREADABLE_SHOWN]),
            "lists": state.lists,
            "heard_s_ago": round(time.monotonic() - state.contact_s, 1) if state.listed else None,
            "error": str(state.error) if state.error is not None else None,
        }

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
                    self._take(turn, self.mirror.empty(), WatchState())
                    self._pause(turn, None)
                    why = "asked"
                    continue
            began_s = time.monotonic()
            try:
                kind = self._list(kinds, why, turn)
                if kind is None:
                    self._pause(turn, _ABSENT_S)
                    continue
                while turn == self._turn:
                    # The server's own end: the version is good to go on from.
                    self._watch(kind, turn, short=kind is not kinds[0])
                    if kind is not kinds[0]:
                        break
                why = "ended"
            except ClusterError as error:
                if turn != self._turn:
                    why = "asked"
                    continue
                why = self._failed(error)
                lived = time.monotonic() - began_s > _WAIT_MAX_S
                wait_s = _WAIT_MIN_S if lived else min(2 * wait_s, _WAIT_MAX_S)
                self._pause(turn, wait_s * random.uniform(0.5, 1.0))
            except Exception:
                _log.exception("watch of %s; it begins anew", self.name)
                why = "internal_error"
                self._pause(turn, _WAIT_MAX_S)

    def _list(self, kinds: Sequence[Kind], why: str, turn: int) -> Kind | None:
        """Takes over a full list; answers of which kind, None if there is none of them."""
        found = None
        for kind in kinds:
            mirror = self.mirror.empty()
            try:
                for page in self._client.pages(kind):
                    mirror.add(page.items or ())
                    mirror.version = page.metadata.resource_version
                found = kind
                break
            except ClusterError as error:
                if error.status != _NOT_FOUND or not (self._optional or kind is not kinds[-1]):
                    raise
        state = WatchState(
            listed=True,
            absent=found is None,
            lists={**self.state.lists, why: self.state.lists.get(why, 0) + 1},
            contact_s=time.monotonic(),
            group=found.group if found is not None else "",
        )
        self._take(turn, mirror if found is not None else self.mirror.empty(), state)
        return found

    def _take(self, turn: int, mirror: Mirror[_T], state: WatchState) -> None:
        with self._wake:
            if turn != self._turn:
                return
            self.mirror, self.state = mirror, state
        self._changed()

    def _watch(self, kind: Kind, turn: int, *, short: bool) -> None:
        """Follows events until the server ends the watch."""
        lasts_s = min(self._deadline_s, _ABSENT_S if short else self._deadline_s) * random.uniform(0.5, 0.8)
        began_s = time.monotonic()
        stream = self._client.watch(kind, self.mirror.version, lasts_s=lasts_s, silent_s=self._deadline_s)
        try:
            with self._wake:
                if turn != self._turn:
                    return
                self._stream = stream
            for event in stream:
                self._take(turn, self.mirror.after(event), self._in_contact())
                if turn != self._turn:
                    return
            self.state = self._in_contact()
        finally:
            with self._wake:
                self._stream = None
            stream.close()
        if time.monotonic() - began_s < _SHORTEST_S:
            # Who ends it again and again must not keep us, and itself, busy.
            self._pause(turn, _SHORTEST_S)

    def _in_contact(self) -> WatchState:
        return replace(self.state, contact_s=time.monotonic(), error=None)

    def _failed(self, error: ClusterError) -> str:
        """Notes why, and answers it in a word."""
        if error.status == GONE:
            _log.info("%s are listed again: %s", self.name, error)
            return "gone"
        if error.status not in _KEEPS_CREDENTIALS:
            try:
                self._client.renew()
            except ClusterError as unreadable:
                error = unreadable
        self.state = replace(self.state, error=error)
        self._changed()
        return "failed"

    def _pause(self, turn: int, wait_s: float | None) -> None:
        """Waits, but not longer than until something else is asked for."""
        with self._wake:
            self._wake.wait_for(lambda: self._turn != turn, wait_s)


class WatchCollector(Collector):
    """Metrics of watches, made when they are scraped."""

    def __init__(self, watches: Mapping[str, Reflector[Any]]) -> None:
        self._watches = watches

    def collect(self) -> Iterable[Metric]:
        lists = CounterMetricFamily(
            _OURS + "lists", "Full lists, by what was listed and why.", labels=["kind", "reason"]
        )
        objects = GaugeMetricFamily(_OURS + "objects", "Objects that are known.", labels=["kind"])
        failing = GaugeMetricFamily(_OURS + "watch_failing", "1 while a watch fails.", labels=["kind"])
        age = GaugeMetricFamily(
            _OURS + "contact_age_seconds", "Since the API server told anything.", labels=["kind"]
        )
        for kind, watch in self._watches.items():
            state = watch.state
            for reason, count in state.lists.items():
                lists.add_metric([kind, reason], count)
            objects.add_metric([kind], len(watch.mirror.objects))
            failing.add_metric([kind], state.error is not None)
            if state.listed:
                age.add_metric([kind], time.monotonic() - state.contact_s)
        yield from (lists, objects, failing, age)
