"""Cache of one kind's objects: lists and watch events in, objects by name out.

Events are applied as client-go's cache does: what is added or modified replaces what has that name. Objects
that cannot be read are held as problems, so that what follows about them is understood. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from msgspec import Raw

from router.errors import ClusterError
from router.kube.objects import BadObjectError, Bookmark, Head, WatchEvent, read

_T = TypeVar("_T")

GONE = 410
"""Status of what can be told only by a new list."""

_ADDED, _MODIFIED, _DELETED, _BOOKMARK = "ADDED", "MODIFIED", "DELETED", "BOOKMARK"
_PROBLEM_CHARS_MAX = 200


class Mirror(Generic[_T]):
    """Objects by name, as many as there is room for.

    Filled page by page with `add`; once others read it, it never changes: an event makes another one.

    Args:
        kind: What objects are read as.
        capacity: Objects beyond it are left out and counted.
        version: Where a watch goes on from.

    Attributes:
        objects: Those that could be read.
        left_out: Objects for which there was no room.
    """

    def __init__(self, kind: type[_T], capacity: int, version: str = "") -> None:
        self.version = version
        self.objects: dict[str, _T] = {}
        self.left_out = 0
        self._unreadable: dict[str, str] = {}
        self._nameless = 0
        self._kind = kind
        self._capacity = capacity

    @property
    def problems(self) -> dict[str, str]:
        """By name, what is wrong with those that cannot be read; "" stands for all that have no name."""
        nameless = {"": f"{self._nameless} without usable metadata"} if self._nameless else {}
        return self._unreadable | nameless

    def empty(self) -> Mirror[_T]:
        """Return a mirror of the same kind to be filled."""
        return Mirror(self._kind, self._capacity)

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
        changed = Mirror(self._kind, self._capacity, self.version)
        changed.objects, changed._unreadable = self.objects.copy(), self._unreadable.copy()
        changed.left_out, changed._nameless = self.left_out, self._nameless
        try:
            if event.type == _BOOKMARK:
                version = read(event.object, Bookmark).metadata.resource_version
            else:
                metadata = read(event.object, Head).metadata
                version = metadata.resource_version
                changed._apply(event, metadata.name)
        except BadObjectError as error:
            raise ClusterError(GONE, f"a {event.type[:20]!r} that cannot be read: {error}") from error
        changed.version = version or self.version
        return changed

    def _apply(self, event: WatchEvent, name: str) -> None:
        if event.type in (_ADDED, _MODIFIED):
            self._put(name, event.object)
        elif event.type != _DELETED:
            raise ClusterError(GONE, f"unknown event {event.type[:20]!r}")
        elif self._pop(name) and self.left_out:
            raise ClusterError(GONE, "there is room for objects that were left out")

    def _put(self, name: str, data: Raw) -> None:
        """Take an object in the place of what has its name."""
        if not self._pop(name) and len(self.objects) + len(self._unreadable) >= self._capacity:
            self.left_out += 1
            return
        try:
            self.objects[name] = read(data, self._kind)
        except BadObjectError as error:
            self._unreadable[name] = str(error)[:_PROBLEM_CHARS_MAX]

    def _pop(self, name: str) -> bool:
        """Remove an object; return whether it was there."""
        was_known = name in self.objects or name in self._unreadable
        self.objects.pop(name, None)
        self._unreadable.pop(name, None)
        return was_known
