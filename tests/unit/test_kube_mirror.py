"""The mirror of one kind's objects: what the API server says last, whatever a watch brings."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from router.errors import ClusterError
from router.pods.kube.objects import BadObjectError, Head, ObjectList, PodObject, WatchEvent, read
from router.pods.kube.reflector import Mirror
from tests.unit.kube_objects import JSON, pod_json, raw


def thing(name: str, version: int, uid: str = "") -> dict[str, object]:
    """An object of which nothing but the metadata matters."""
    return {"metadata": {"name": name, "uid": uid or f"uid-{name}", "resourceVersion": str(version)}}


def event(kind: str, name: str, version: int, uid: str = "") -> WatchEvent:
    """One line of a watch."""
    return WatchEvent(kind, raw(thing(name, version, uid)))


def mirror(*items: object, kind: Any = Head, capacity: int = 100, version: str = "10") -> Mirror[Any]:
    """A mirror after a list of one page."""
    made = Mirror(kind, capacity)
    made.add(raw(item) for item in items)
    made.version = version
    return made


def after(held: Mirror[Any], *events: WatchEvent) -> Mirror[Any]:
    """The mirror after events."""
    for each in events:
        held = held.after(each)
    return held


def test_events_are_applied_in_turn() -> None:
    """Added, modified and deleted objects are what is held, and the watch goes on from the last version."""
    held = mirror(thing("a", 1), thing("b", 2))
    held = after(held, event("ADDED", "c", 11), event("MODIFIED", "a", 12), event("DELETED", "b", 13))
    versions = {name: each.metadata.resource_version for name, each in held.objects.items()}
    assert (versions, held.version) == ({"a": "12", "c": "11"}, "13")
    bookmark = WatchEvent("BOOKMARK", raw({"metadata": {"resourceVersion": "20"}}))
    assert (held.after(bookmark).objects, held.after(bookmark).version) == (held.objects, "20")


def test_what_was_read_before_never_changes() -> None:
    """An event makes another mirror; a reader's stays as it was."""
    held = mirror(thing("a", 1))
    changed = held.after(event("ADDED", "b", 11))
    assert (set(held.objects), held.version) == ({"a"}, "10")
    assert (set(changed.objects), changed.version) == ({"a", "b"}, "11")


@pytest.mark.parametrize(
    "unreadable",
    [
        event("SURPRISE", "a", 11),
        WatchEvent("BOOKMARK", raw([])),
        WatchEvent("ADDED", raw({"metadata": {}})),
        WatchEvent("ADDED", raw(None)),
    ],
)
def test_an_event_that_cannot_be_read_asks_for_a_list_and_changes_nothing(unreadable: WatchEvent) -> None:
    """What is not understood may concern any object, so the whole is listed again."""
    held = mirror(thing("a", 1))
    with pytest.raises(ClusterError) as raised:
        held.after(unreadable)
    assert (raised.value.status, list(held.objects), held.version) == (410, ["a"], "10")


def test_what_the_server_says_last_counts() -> None:
    """An object that is there is replaced, one that is not known is added, and none is missed."""
    held = after(
        mirror(thing("a", 1)),
        event("ADDED", "a", 11, uid="another"),
        event("MODIFIED", "b", 12),
        event("DELETED", "c", 13),
    )
    assert [(one.metadata.name, one.metadata.uid) for one in held.objects.values()] == [
        ("a", "another"),
        ("b", "uid-b"),
    ]


def test_versions_are_opaque() -> None:
    """A watch goes on from whatever version came last, be it a number or not."""
    held = mirror(version="99")
    for version in ("apple", "9", "9" * 5000):
        metadata = {"name": "a", "uid": "u", "resourceVersion": version}
        held = held.after(WatchEvent("ADDED", raw({"metadata": metadata})))
        assert held.version == version


def test_an_unreadable_object_is_held_as_such() -> None:
    """It is named with what is wrong; what follows about it is understood, and others are not touched."""
    wrong = {"metadata": {"name": "w", "uid": "u", "resourceVersion": "1"}, "status": 5}
    held = mirror(wrong, pod_json("a"), {"metadata": {"name": ""}}, 7, kind=PodObject)
    assert list(held.objects) == ["a"]
    assert "status" in held.problems["w"]
    assert held.problems[""] == "2 without usable metadata"
    mended = pod_json("w", uid="u", resourceVersion="11")
    held = held.after(WatchEvent("MODIFIED", raw(mended)))
    assert set(held.objects) == {"a", "w"}
    assert list(held.problems) == [""]


def test_there_is_room_for_so_many_and_the_others_are_counted() -> None:
    """A list and a watch are cut at the capacity; when one goes, others are listed again."""
    held = mirror(*(thing(f"a{number}", number) for number in range(5)), capacity=3)
    assert (len(held.objects), held.left_out) == (3, 2)
    held = after(held, event("ADDED", "b", 11), event("MODIFIED", "a0", 12))
    assert (set(held.objects), held.left_out) == ({"a0", "a1", "a2"}, 3)
    with pytest.raises(ClusterError, match="room"):
        held.after(event("DELETED", "a0", 13))


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[WatchEvent], dict[str, str]]:
    """What truly happened to a few objects, as events in order, and how it ended."""
    alive: dict[str, tuple[int, str]] = {}
    events = []
    for version in range(11, 11 + draw(st.integers(1, 12))):
        name = draw(st.sampled_from("abc"))
        if name in alive:
            kind = draw(st.sampled_from(["MODIFIED", "DELETED"]))
            uid = alive[name][1]
        else:
            kind, uid = "ADDED", f"{name}-{version}"
        if kind == "DELETED":
            del alive[name]
        else:
            alive[name] = version, uid
        events.append(event(kind, name, version, uid))
    return events, {name: str(version) for name, (version, _) in alive.items()}


@given(histories())
def test_after_any_history_the_mirror_is_right(history: tuple[list[WatchEvent], dict[str, str]]) -> None:
    """Events in the server's order lead to what there is."""
    events, truth = history
    held = after(mirror(), *events)
    assert {name: each.metadata.resource_version for name, each in held.objects.items()} == truth


@given(st.lists(JSON, max_size=5), st.text(max_size=10), JSON)
def test_hostile_json_is_a_problem_or_listed_again(items: list[object], kind: str, value: object) -> None:
    """Whatever is listed or watched, nothing but the wish for a list is raised."""
    held = mirror(*items, kind=PodObject, capacity=3)
    for name in (kind, "ADDED", "MODIFIED", "DELETED", "BOOKMARK"):
        with suppress(ClusterError):
            held = held.after(WatchEvent(name, raw(value)))
    assert len(held.objects) <= 3


@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
def test_hostile_bytes_are_bad_objects(data: bytes) -> None:
    """Pages and events that are none are refused by the one error for that."""
    for kind in (ObjectList, WatchEvent, PodObject):
        with suppress(BadObjectError):
            assert isinstance(read(Raw(data), kind), kind)
