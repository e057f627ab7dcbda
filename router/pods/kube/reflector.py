"""List-and-watch loop of one kind of objects, like client-go's Reflector, on its own thread.

After a regular end of a watch, the next one continues from its last version. After an error, all objects are
listed again; the new list replaces the old one only when complete, so that no object disappears meanwhile.
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

_PREFIX = "kvroute_discovery_"
_WAIT_MIN_S, _WAIT_MAX_S = 0.2, 10.0
# Interval of checks for an optional kind that does not exist.
ABSENT_S = 30.0
_SHORTEST_S = 0.5
_STOP_S = 2.0
# Status 410 (Gone) requires a new list.
_NOT_FOUND, _FORBIDDEN, _GONE = 404, 403, 410
_KEEPS_CREDENTIALS = frozenset({_NOT_FOUND, _GONE, _FORBIDDEN})
_UNREADABLE_SHOWN = 10
_PROBLEM_CHARS_MAX = 200


@dataclass
class Mirror(Generic[_T]):
    """Local copy of the objects of one kind, by name.

    Filled page by page with `add`, then immutable: an event gives a new mirror. Invalid objects are kept as
    problems, so that later events about them can be applied.
    """

    kind: type[_T]  # type that objects are parsed as
    capacity: int  # maximum number of objects; further ones are left out
    version: str = ""  # resource version from which a watch continues
    objects: dict[str, _T] = field(default_factory=dict)
    left_out: int = 0
    _unreadable: dict[str, str] = field(default_factory=dict)
    _nameless: int = 0

    @property
    def problems(self) -> dict[str, str]:
        """Error text of invalid objects by name; the key "" covers all objects without a name."""
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
            ClusterError: Status 410: the event is invalid, or makes room for an object that was left out.
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
            raise ClusterError(_GONE, f"invalid event {event.type[:20]!r}: {error}") from error
        changed.version = version or self.version
        return changed

    def _apply(self, event: WatchEvent, name: str) -> None:
        # Like client-go's cache: an added or modified object replaces the one with its name.
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
    """Mirror of one kind of objects, kept up to date until closed."""

    name: str  # resource name for logs
    client: KubeClient
    mirror: Mirror[_T]  # initially empty; replaced on every change
    changed: Callable[[], None]  # called on the reflector's thread when the mirror or the state changed
    deadline_s: float  # a watch that is silent for this long is reconnected
    optional: bool = False  # whether the kind may be missing in the cluster

    def __post_init__(self) -> None:
        self.listed = False  # whether the current kind has been listed completely
        self.absent = False  # whether the kind is optional and missing
        self.error: ClusterError | None = None  # error of the last attempt; None while the watch works
        self.lists: Counter[str] = Counter()  # number of full lists by reason
        self.contact_s = -1.0  # time of the last response (monotonic seconds)
        self.group = ""  # API group of the watched kind
        self._wake = Condition()
        # Guarded by _wake: the requested kinds, the number of the request, and the open watch.
        self._kinds: Sequence[Kind] = ()
        self._generation = 0
        self._stream: WatchStream | None = None
        self._closing = False
        self._thread = Thread(target=self._run, name=f"kube-{self.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._request((), closing=True)
        if self._thread.is_alive():
            # A thread that is blocked by an unresponsive server ends with the process.
            self._thread.join(_STOP_S)

    def follow(self, *kinds: Kind) -> None:
        """Watch the first of these kinds that exists; without kinds, stop watching and clear the mirror.

        The old objects stay until the new list is complete. Never blocks.
        """
        if kinds != tuple(self._kinds):
            self._request(kinds)

    def status(self) -> dict[str, Any]:
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

    def _request(self, kinds: Sequence[Kind], *, closing: bool = False) -> None:
        with self._wake:
            self._kinds, self._generation = kinds, self._generation + 1
            self._closing = self._closing or closing
            if self._stream is not None:
                self._stream.stop()
            self._wake.notify_all()

    def _run(self) -> None:
        wait_s, why = _WAIT_MIN_S, "start"
        while True:
            with self._wake:
                generation, kinds = self._generation, self._kinds
                if self._closing:
                    return
                if not kinds:
                    self._publish(generation, self.mirror.empty(), listed=False)
                    self._pause(generation, None)
                    why = "asked"
                    continue
            began_s = time.monotonic()
            try:
                kind = self._list(kinds, why, generation)
                if kind is None:
                    self._pause(generation, ABSENT_S)
                    continue
                while generation == self._generation:
                    # The server ended the previous watch regularly, so its version is still valid.
                    self._watch(kind, generation, short=kind is not kinds[0])
                    if kind is not kinds[0]:
                        break
                why = "ended"
            except ClusterError as error:
                if generation != self._generation:
                    why = "asked"
                    continue
                why = self._failed(error)
                lived = time.monotonic() - began_s > _WAIT_MAX_S
                wait_s = _WAIT_MIN_S if lived else min(2 * wait_s, _WAIT_MAX_S)
                self._pause(generation, wait_s * random.uniform(0.5, 1.0))
            except Exception:
                _log.exception("watch failed, restarting: kind=%s", self.name)
                why = "internal_error"
                self._pause(generation, _WAIT_MAX_S)

    def _list(self, kinds: Sequence[Kind], why: str, generation: int) -> Kind | None:
        """List all objects of the first kind that exists; return that kind, or None if none exists."""
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
        self._publish(generation, mirror if found is not None else self.mirror.empty())
        return found

    def _publish(self, generation: int, mirror: Mirror[_T], *, listed: bool = True) -> None:
        """Publish a new mirror, unless other kinds were requested meanwhile."""
        with self._wake:
            if generation != self._generation:
                return
            self.mirror, self.listed = mirror, listed
            self._record_contact()
        self.changed()

    def _record_contact(self) -> None:
        self.contact_s, self.error = time.monotonic(), None

    def _watch(self, kind: Kind, generation: int, *, short: bool) -> None:
        """Apply events until the server ends the watch."""
        lasts_s = min(self.deadline_s, ABSENT_S if short else self.deadline_s) * random.uniform(0.5, 0.8)
        began_s = time.monotonic()
        stream = self.client.watch(kind, self.mirror.version, lasts_s=lasts_s, silent_s=self.deadline_s)
        try:
            with self._wake:
                if generation != self._generation:
                    return
                self._stream = stream
            for event in stream:
                self._publish(generation, self.mirror.after(event))
                if generation != self._generation:
                    return
            self._record_contact()
        finally:
            with self._wake:
                self._stream = None
            stream.close()
        if time.monotonic() - began_s < _SHORTEST_S:
            # Limit the load if the server ends every watch at once.
            self._pause(generation, _SHORTEST_S)

    def _failed(self, error: ClusterError) -> str:
        if error.status == _GONE:
            _log.info("watch expired, listing again: kind=%s error=%s", self.name, error)
            return "gone"
        if error.status not in _KEEPS_CREDENTIALS:
            try:
                self.client.renew()
            except ClusterError as unreadable:
                error = unreadable
        self.error = error
        self.changed()
        return "failed"

    def _pause(self, generation: int, wait_s: float | None) -> None:
        """Wait for this long, or until other kinds are requested."""
        with self._wake:
            self._wake.wait_for(lambda: self._generation != generation, wait_s)


@dataclass(eq=False)
class WatchCollector(Collector):
    """Prometheus collector of the watches' metrics."""

    watches: Mapping[str, Reflector[Any]]

    def collect(self) -> Iterable[Metric]:
        lists = CounterMetricFamily(
            _PREFIX + "lists", "Full lists, by kind and reason.", labels=["kind", "reason"]
        )
        objects = GaugeMetricFamily(_PREFIX + "objects", "Known objects.", labels=["kind"])
        failing = GaugeMetricFamily(_PREFIX + "watch_failing", "1 while a watch fails.", labels=["kind"])
        age = GaugeMetricFamily(
            _PREFIX + "contact_age_seconds",
            "Time since the last response of the API server.",
            labels=["kind"],
        )
        for kind, watch in self.watches.items():
            for reason, count in dict(watch.lists).items():
                lists.add_metric([kind, reason], count)
            objects.add_metric([kind], len(watch.mirror.objects))
            failing.add_metric([kind], watch.error is not None)
            if watch.listed:
                age.add_metric([kind], time.monotonic() - watch.contact_s)
        yield from (lists, objects, failing, age)
