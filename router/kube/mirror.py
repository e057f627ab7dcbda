"""The objects of one kind as the API server tells them: lists and watch events in, objects by name out.

Versions are opaque: what does not fit to what is held is a doubt, after which the whole is listed again.
Objects that cannot be read are held as such, so that what follows about them is understood. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from msgspec import Raw

from router.kube.objects import BadObjectError, Bookmark, Head, WatchEvent, read

_T = TypeVar("_T")

_ADDED, _MODIFIED, _DELETED, _BOOKMARK = "ADDED", "MODIFIED", "DELETED", "BOOKMARK"
_PROBLEM_CHARS_MAX = 200
_VERSION_DIGITS_MAX = 20


class DoubtError(Exception):
    """An event that contradicts what is held; the message says how."""


@dataclass(frozen=True, slots=True)
class _Held(Generic[_T]):
    uid: str
    version: str
    value: _T | None
    problem: str = ""


class Listing(Generic[_T]):
    """A list that is being read.

    Attributes:
        held: What was read, by name.
        nameless: Objects without usable metadata.
        left_out: Objects for which there was no room.
    """

    def __init__(self, kind: type[_T], capacity: int) -> None:
        self.held: dict[str, _Held[_T]] = {}
        self.nameless = 0
        self.left_out = 0
        self._kind = kind
        self._capacity = capacity

    def add(self, items: Iterable[Raw]) -> None:
        """Reads a page."""
        for item in items:
            try:
                name, told = _read_held(item, self._kind)
            except BadObjectError:
                self.nameless += 1
                continue
            if len(self.held) < self._capacity or name in self.held:
                self.held[name] = told
            else:
                self.left_out += 1


class Mirror(Generic[_T]):
    """Written by one thread; `objects` and `problems` may be read by any, and never change afterwards.

    Args:
        kind: What objects are read as.
        capacity: Objects beyond it are left out and counted.

    Attributes:
        version: Where a watch goes on from.
        left_out: Objects for which there was no room in the last list.
    """

    def __init__(self, kind: type[_T], capacity: int) -> None:
        self.version = ""
        self.left_out = 0
        self._kind = kind
        self._capacity = capacity
        self._held: dict[str, _Held[_T]] = {}
        self._nameless = 0
        self._objects: Mapping[str, _T] = {}
        self._problems: Mapping[str, str] = {}

    @property
    def objects(self) -> Mapping[str, _T]:
        """All that could be read, by name."""
        return self._objects

    @property
    def problems(self) -> Mapping[str, str]:
        """By name, what is wrong with those that could not; "" stands for all that have no name."""
        return self._problems

    def clear(self) -> None:
        """Forgets all."""
        self.replace(self.listing(), "")

    def listing(self) -> Listing[_T]:
        """A list to be filled page by page, while this stays as it is."""
        return Listing(self._kind, self._capacity)

    def replace(self, listing: Listing[_T], version: str) -> None:
        """Takes a whole list, at once."""
        self._held, self._nameless = dict(listing.held), listing.nameless
        self.version, self.left_out = version, listing.left_out
        self._publish()

    def apply(self, event: WatchEvent) -> bool:
        """Takes one event; answers whether anything changed.

        Raises:
            DoubtError: It does not fit to what is held.
        """
        if event.type == _BOOKMARK:
            self._move_to(_read_or_doubt(event.object, Bookmark).metadata.resource_version)
            return False
        if event.type not in (_ADDED, _MODIFIED, _DELETED):
            raise DoubtError(f"unknown event {event.type[:20]!r}")
        try:
            name, told = _read_held(event.object, self._kind)
        except BadObjectError as error:
            raise DoubtError(f"an object without usable metadata: {error}") from error
        known = self._held.get(name)
        if event.type == _ADDED:
            if known is not None and (known.uid, known.version) != (told.uid, told.version):
                raise DoubtError(f"{name} was added though it is there")
            if known is None and len(self._held) >= self._capacity:
                raise DoubtError(f"there is no room for {name}")
        elif known is None:
            raise DoubtError(f"{name} was {event.type.lower()} and is not known")
        elif known.uid != told.uid:
            raise DoubtError(f"{name} was {event.type.lower()}, but it is another of that name that is known")
        self._move_to(told.version)
        if event.type == _DELETED:
            del self._held[name]
        elif known is not None and known.version == told.version:
            return False
        else:
            self._held[name] = told
        self._publish()
        return True

    def _move_to(self, version: str) -> None:
        # Not for ordering, which is the server's: numbers that run backwards are only a reason to ask again.
        if _is_number(version) and _is_number(self.version) and int(version) < int(self.version):
            raise DoubtError(f"version {version} came after {self.version}")
        self.version = version or self.version

    def _publish(self) -> None:
        self._objects = {name: held.value for name, held in self._held.items() if held.value is not None}
        problems = {name: held.problem for name, held in self._held.items() if held.problem}
        if self._nameless:
            problems[""] = f"{self._nameless} without usable metadata"
        self._problems = problems


def _read_held(data: Raw, kind: type[_T]) -> tuple[str, _Held[_T]]:
    metadata = read(data, Head).metadata
    try:
        value, problem = read(data, kind), ""
    except BadObjectError as error:
        value, problem = None, str(error)[:_PROBLEM_CHARS_MAX]
    return metadata.name, _Held(metadata.uid, metadata.resource_version, value, problem)


def _is_number(version: str) -> bool:
    return version.isdecimal() and len(version) <= _VERSION_DIGITS_MAX


def _read_or_doubt(data: Raw, kind: type[_T]) -> _T:
    """Reads what a watch sent.

    Raises:
        DoubtError: It cannot be read.
    """
    try:
        return read(data, kind)
    except BadObjectError as error:
        raise DoubtError(str(error)) from error
