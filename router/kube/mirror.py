"""Cache of one kind's objects: lists and watch events in, objects by name out.

Events are applied as client-go's cache does: what is added or modified replaces what has that name. Objects
that cannot be read are held as problems, so that what follows about them is understood. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

from msgspec import Raw

from router.kube.objects import BadObjectError, Bookmark, Head, WatchEvent, read

_T = TypeVar("_T")

_ADDED, _MODIFIED, _DELETED, _BOOKMARK = "ADDED", "MODIFIED", "DELETED", "BOOKMARK"
_PROBLEM_CHARS_MAX = 200


class RelistError(Exception):
    """An event after which the whole must be listed again; the message says why."""


class Listing(Generic[_T]):
    """Objects by name, as many as there is room for.

    Attributes:
        objects: Those that could be read.
        problems: By name, what is wrong with those that could not.
        nameless: How many had no usable metadata.
        left_out: Objects for which there was no room.
    """

    def __init__(self, kind: type[_T], capacity: int) -> None:
        self.objects: dict[str, _T] = {}
        self.problems: dict[str, str] = {}
        self.nameless = 0
        self.left_out = 0
        self._kind = kind
        self._capacity = capacity

    def add(self, items: Iterable[Raw]) -> None:
        for item in items:
            try:
                self.put(read(item, Head).metadata.name, item)
            except BadObjectError:
                self.nameless += 1

    def put(self, name: str, data: Raw) -> None:
        """Take an object in the place of what has its name."""
        if name not in self and len(self.objects) + len(self.problems) >= self._capacity:
            self.left_out += 1
            return
        try:
            self.objects[name] = read(data, self._kind)
            self.problems.pop(name, None)
        except BadObjectError as error:
            self.problems[name] = str(error)[:_PROBLEM_CHARS_MAX]
            self.objects.pop(name, None)

    def pop(self, name: str) -> bool:
        """Remove an object; return whether it was there."""
        is_known = name in self
        self.objects.pop(name, None)
        self.problems.pop(name, None)
        return is_known

    def __contains__(self, name: str) -> bool:
        return name in self.objects or name in self.problems

    def copy(self) -> Listing[_T]:
        copied = Listing(self._kind, self._capacity)
        copied.objects, copied.problems = self.objects.copy(), self.problems.copy()
        copied.nameless, copied.left_out = self.nameless, self.left_out
        return copied


class Mirror(Generic[_T]):
    """Written by one thread; `objects` and `problems` may be read by any, and never change afterwards.

    Args:
        kind: What objects are read as.
        capacity: Objects beyond it are left out and counted.

    Attributes:
        version: Where a watch goes on from.
    """

    def __init__(self, kind: type[_T], capacity: int) -> None:
        self.version = ""
        self._kind = kind
        self._capacity = capacity
        self._held = self.listing()

    @property
    def objects(self) -> Mapping[str, _T]:
        """All that could be read, by name."""
        return self._held.objects

    @property
    def problems(self) -> Mapping[str, str]:
        """By name, what is wrong with those that could not; "" stands for all that have no name."""
        held = self._held
        nameless = {"": f"{held.nameless} without usable metadata"} if held.nameless else {}
        return held.problems | nameless

    @property
    def left_out(self) -> int:
        return self._held.left_out

    def clear(self) -> None:
        self.replace(self.listing(), "")

    def listing(self) -> Listing[_T]:
        """A list to be filled page by page, while this stays as it is."""
        return Listing(self._kind, self._capacity)

    def replace(self, listing: Listing[_T], version: str) -> None:
        self._held, self.version = listing, version

    def apply(self, event: WatchEvent) -> bool:
        """Take one event; return whether objects may have changed.

        Raises:
            RelistError: It cannot be read, or makes room for objects that were left out.
        """
        try:
            if event.type == _BOOKMARK:
                self.version = read(event.object, Bookmark).metadata.resource_version or self.version
                return False
            metadata = read(event.object, Head).metadata
        except BadObjectError as error:
            raise RelistError(f"a {event.type[:20]!r} that cannot be read: {error}") from error
        if event.type not in (_ADDED, _MODIFIED, _DELETED):
            raise RelistError(f"unknown event {event.type[:20]!r}")
        held = self._held.copy()
        if event.type != _DELETED:
            held.put(metadata.name, event.object)
        elif held.pop(metadata.name) and held.left_out:
            raise RelistError("there is room for objects that were left out")
        self.replace(held, metadata.resource_version or self.version)
        return True
