"""One list-and-watch loop: keeps a mirror of one kind's objects, on a thread of its own.

What a clean end of a watch leaves is gone on from; after anything else the whole is listed again, and taken
over only when it is complete, so that a relist never shows less than there is.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Condition, Thread
from typing import Any, Generic, TypeVar

from msgspec import Raw
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.errors import ClusterError
from router.pods.kube.client import Kind, KubeClient, WatchStream
from router.pods.kube.objects import BadObjectError, Head, ObjectList, WatchEvent, read

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

_OURS = "kvroute_discovery_"
_WAIT_MIN_S, _WAIT_MAX_S = 0.2, 10.0
# Of a kind that need not exist: how often it is looked for.
ABSENT_S = 30.0
_SHORTEST_S = 0.5
_STOP_S = 2.0
# Gone: what can be told only by a new list.
_NOT_FOUND, _FORBIDDEN, _GONE = 404, 403, 410
_KEEPS_CREDENTIALS = frozenset({_NOT_FOUND, _GONE, _FORBIDDEN})
_UNREADABLE_SHOWN = 10
_PROBLEM_CHARS_MAX = 200


@dataclass
class Mirror(Generic[_T]):
    """Objects of one kind by name, as many as there is room for.

    Filled page by page with `add`; once others read it, it never changes: an event makes another one. Objects
    that cannot be read are held as problems, so that what follows about them is understood.
    """

    kind: type[_T]  # what objects are read as
    capacity: int  # objects beyond it are left out
    version: str = ""  # where a watch goes on from
    objects: dict[str, _T] = field(default_factory=dict)
    left_out: int = 0
    _unreadable: dict[str, str] = field(default_factory=dict)
    _nameless: int = 0

    @property
    def problems(self) -> dict[str, str]:
        """By name, what is wrong with those that cannot be read; "" stands for all that have no name."""
        nameless = {"": f"{self._nameless} without usable metadata"} if self._nameless else {}
        return self._unreadable | nameless

    def empty(self) -> Mirror[_T]:
        return Mirror(self.kind, self.capacity)

    def add(self, items: Iterable[Raw]) -> None:
        for item in items:
            try:
                self._put(read(item, Head).metadata.name, item)
            except BadObjectError:
                self._nameless += 1

    def after(self, event: WatchEvent) -> Mirror[_T]:
        """Return this mirror with one event applied.

        Raises:
            ClusterError: 410: it cannot be read, or makes room for objects that were left out.
        """
        changed = replace(self, objects=self.objects.copy(), _unreadable=self._unreadable.copy())
        try:
            if event.type == "BOOKMARK":
                version = read(event.object, ObjectList).metadata.resource_version
            else:
                metadata = read(event.object, Head).metadata
                version = metadata.resource_version
                changed._apply(event, metadata.name)
        except BadObjectError as error:
            raise ClusterError(_GONE, f"a {event.type[:20]!r} that cannot be read: {error}") from error
        changed.version = version or self.version
        return changed

    def _apply(self, event: WatchEvent, name: str) -> None:
        # As client-go's cache does: what is added or modified replaces what has that name.
        if event.type in ("ADDED", "MODIFIED"):
            self._put(name, event.object)
        elif event.type != "DELETED":
            raise ClusterError(_GONE, f"unknown event {event.type[:20]!r}")
        elif self._pop(name) and self.left_out:
            raise ClusterError(_GONE, "there is room for objects that were left out")

    def _put(self, name: str, data: Raw) -> None:
        if not self._pop(name) and len(self.objects) + len(self._unreadable) >= self.capacity:
            self.left_out += 1
            return
        try:
            self.objects[name] = read(data, self.kind)
        except BadObjectError as error:
            self._unreadable[name] = str(error)[:_PROBLEM_CHARS_MAX]

    def _pop(self, name: str) -> bool:
        """Remove an object; return whether it was there."""
        was_readable = self.objects.pop(name, None) is not None
        return self._unreadable.pop(name, None) is not None or was_readable


@dataclass(eq=False)
class Reflector(Generic[_T]):
    """Watches until closed."""

    name: str  # what is watched, for people
    client: KubeClient
    mirror: Mirror[_T]  # at first empty; replaced by whatever is known later, and never changed
    changed: Callable[[], None]  # told on this object's thread whenever the mirror or the state changed
    deadline_s: float  # a watch that is silent for so long is taken for dead
    optional: bool = False  # whether the kind need not exist

    def __post_init__(self) -> None:
        self.listed = False  # whether the objects were ever listed in full
        self.absent = False  # whether the kind does not exist, and need not
        self.error: ClusterError | None = None  # why it fails now
        self.lists: Counter[str] = Counter()  # how often the whole was listed, by why
        self.contact_s = -1.0  # when the server was heard last
        self.group = ""  # of the kind that is watched
        self._wake = Condition()
        # Guarded by it: what is asked for, which turn that was, and the connection that is read.
        self._kinds: Sequence[Kind] = ()
        self._turn = 0
        self._stream: WatchStream | None = None
        self._closing = False
        self._thread = Thread(target=self._run, name=f"kube-{self.name}", daemon=True)

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
        return {
            "group": self.group,
            "listed": self.listed,
            "absent": self.absent,
            "objects": len(self.mirror.objects),
            "unreadable": dict(list(self.mirror.problems.items())[:_UNREADABLE_SHOWN]),
            "lists": dict(self.lists),
            "heard_s_ago": round(time.monotonic() - self.contact_s, 1) if self.listed else None,
            "error": str(self.error) if self.error is not None else None,
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
                    self._take(turn, self.mirror.empty(), listed=False)
                    self._pause(turn, None)
                    why = "asked"
                    continue
            began_s = time.monotonic()
            try:
                kind = self._list(kinds, why, turn)
                if kind is None:
                    self._pause(turn, ABSENT_S)
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
                for page in self.client.pages(kind):
                    mirror.add(page.items or ())
                    mirror.version = page.metadata.resource_version
                found = kind
                break
            except ClusterError as error:
                if error.status != _NOT_FOUND or not (self.optional or kind is not kinds[-1]):
                    raise
        self.lists[why] += 1
        self.absent, self.group = found is None, found.group if found is not None else ""
        self._take(turn, mirror if found is not None else self.mirror.empty())
        return found

    def _take(self, turn: int, mirror: Mirror[_T], *, listed: bool = True) -> None:
        """Has others see what the server says, unless something else was asked for meanwhile."""
        with self._wake:
            if turn != self._turn:
                return
            self.mirror, self.listed = mirror, listed
            self._heard()
        self.changed()

    def _heard(self) -> None:
        self.contact_s, self.error = time.monotonic(), None

    def _watch(self, kind: Kind, turn: int, *, short: bool) -> None:
        """Follows events until the server ends the watch."""
        lasts_s = min(self.deadline_s, ABSENT_S if short else self.deadline_s) * random.uniform(0.5, 0.8)
        began_s = time.monotonic()
        stream = self.client.watch(kind, self.mirror.version, lasts_s=lasts_s, silent_s=self.deadline_s)
        try:
            with self._wake:
                if turn != self._turn:
                    return
                self._stream = stream
            for event in stream:
                self._take(turn, self.mirror.after(event))
                if turn != self._turn:
                    return
            self._heard()
        finally:
            with self._wake:
                self._stream = None
            stream.close()
        if time.monotonic() - began_s < _SHORTEST_S:
            # Who ends it again and again must not keep us, and itself, busy.
            self._pause(turn, _SHORTEST_S)

    def _failed(self, error: ClusterError) -> str:
        if error.status == _GONE:
            _log.info("%s are listed again: %s", self.name, error)
            return "gone"
        if error.status not in _KEEPS_CREDENTIALS:
            try:
                self.client.renew()
            except ClusterError as unreadable:
                error = unreadable
        self.error = error
        self.changed()
        return "failed"

    def _pause(self, turn: int, wait_s: float | None) -> None:
        """Waits for so long, or until something else is asked for."""
        with self._wake:
            self._wake.wait_for(lambda: self._turn != turn, wait_s)


@dataclass(eq=False)
class WatchCollector(Collector):
    """Metrics of watches, made when they are scraped."""

    watches: Mapping[str, Reflector[Any]]

    def collect(self) -> Iterable[Metric]:
        lists = CounterMetricFamily(
            _OURS + "lists", "Full lists, by what was listed and why.", labels=["kind", "reason"]
        )
        objects = GaugeMetricFamily(_OURS + "objects", "Objects that are known.", labels=["kind"])
        failing = GaugeMetricFamily(_OURS + "watch_failing", "1 while a watch fails.", labels=["kind"])
        age = GaugeMetricFamily(
            _OURS + "contact_age_seconds", "Since the API server told anything.", labels=["kind"]
        )
        for kind, watch in self.watches.items():
            for reason, count in dict(watch.lists).items():
                lists.add_metric([kind, reason], count)
            objects.add_metric([kind], len(watch.mirror.objects))
            failing.add_metric([kind], watch.error is not None)
            if watch.listed:
                age.add_metric([kind], time.monotonic() - watch.contact_s)
        yield from (lists, objects, failing, age)
