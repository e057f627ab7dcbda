"""Mirror of one kind's objects: it equals the API server's state after any events of a watch."""

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
from tests.support.kube.objects import JSON, pod_json, raw


def thing(name: str, version: int, uid: str = "") -> dict[str, object]:
    """Return an object of which only the metadata matters."""
    return {"metadata": {"name": name, "uid": uid or f"uid-{name}", "resourceVersion": str(version)}}


def event(kind: str, name: str, version: int, uid: str = "") -> WatchEvent:
    """Return an event of a watch."""
    return WatchEvent(kind, raw(thing(name, version, uid)))


def mirror(*items: object, kind: Any = Head, capacity: int = 100, version: str = "10") -> Mirror[Any]:
    """Return a mirror after a list of one page."""
    made = Mirror(kind, capacity)
    made.add(raw(item) for item in items)
    made.version = version
    return made


def after(held: Mirror[Any], *events: WatchEvent) -> Mirror[Any]:
    """Return the mirror after these events."""
    for each in events:
        held = held.after(each)
    return held


def test_events_are_applied_in_order() -> None:
    """Added, modified and deleted objects update the mirror and its version."""
    held = mirror(thing("a", 1), thing("b", 2))
    held = after(held, event("ADDED", "c", 11), event("MODIFIED", "a", 12), event("DELETED", "b", 13))
    versions = {name: each.metadata.resource_version for name, each in held.objects.items()}
    assert (versions, held.version) == ({"a": "12", "c": "11"}, "13")
    bookmark = WatchEvent("BOOKMARK", raw({"metadata": {"resourceVersion": "20"}}))
    assert (held.after(bookmark).objects, held.after(bookmark).version) == (held.objects, "20")


def test_a_mirror_is_immutable() -> None:
    """An event gives a new mirror; the old one is unchanged."""
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
def test_an_invalid_event_requires_a_new_list(unreadable: WatchEvent) -> None:
    """An event that cannot be parsed raises 410, because it may concern any object, and changes nothing."""
    held = mirror(thing("a", 1))
    with pytest.raises(ClusterError) as raised:
        held.after(unreadable)
    assert (raised.value.status, list(held.objects), held.version) == (410, ["a"], "10")


def test_the_latest_event_of_a_name_applies() -> None:
    """An event replaces a known object and adds an unknown one."""
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
    """A watch continues from the last version, whether it is a number or not."""
    held = mirror(version="99")
    for version in ("apple", "9", "9" * 5000):
        metadata = {"name": "a", "uid": "u", "resourceVersion": version}
        held = held.after(WatchEvent("ADDED", raw({"metadata": metadata})))
        assert held.version == version


def test_an_invalid_object_is_kept_as_a_problem() -> None:
    """An invalid object is named with its error, later events about it apply, and others are unaffected."""
    wrong = {"metadata": {"name": "w", "uid": "u", "resourceVersion": "1"}, "status": 5}
    held = mirror(wrong, pod_json("a"), {"metadata": {"name": ""}}, 7, kind=PodObject)
    assert list(held.objects) == ["a"]
    assert "status" in held.problems["w"]
    assert held.problems[""] == "2 without usable metadata"
    mended = pod_json("w", uid="u", resourceVersion="11")
    held = held.after(WatchEvent("MODIFIED", raw(mended)))
    assert set(held.objects) == {"a", "w"}
    assert list(held.problems) == [""]


def test_objects_above_the_capacity_are_counted() -> None:
    """Objects above the capacity are left out; if one is deleted, all are listed again."""
    held = mirror(*(thing(f"a{number}", number) for number in range(5)), capacity=3)
    assert (len(held.objects), held.left_out) == (3, 2)
    held = after(held, event("ADDED", "b", 11), event("MODIFIED", "a0", 12))
    assert (set(held.objects), held.left_out) == ({"a0", "a1", "a2"}, 3)
    with pytest.raises(ClusterError, match="room"):
        held.after(event("DELETED", "a0", 13))


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[WatchEvent], dict[str, str]]:
    """Draw the true history of a few objects as ordered events, and the final versions."""
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
def test_a_mirror_equals_the_servers_state(history: tuple[list[WatchEvent], dict[str, str]]) -> None:
    """Events in the server's order lead to the server's state."""
    events, truth = history
    held = after(mirror(), *events)
    assert {name: each.metadata.resource_version for name, each in held.objects.items()} == truth


@given(st.lists(JSON, max_size=5), st.text(max_size=10), JSON)
def test_hostile_json_is_a_problem_or_a_new_list(items: list[object], kind: str, value: object) -> None:
    """Arbitrary JSON in lists and watches raises nothing but ClusterError."""
    held = mirror(*items, kind=PodObject, capacity=3)
    for name in (kind, "ADDED", "MODIFIED", "DELETED", "BOOKMARK"):
        with suppress(ClusterError):
            held = held.after(WatchEvent(name, raw(value)))
    assert len(held.objects) <= 3


@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
def test_hostile_bytes_are_bad_objects(data: bytes) -> None:
    """Arbitrary bytes raise nothing but BadObjectError."""
    for kind in (ObjectList, WatchEvent, PodObject):
        with suppress(BadObjectError):
            assert isinstance(read(Raw(data), kind), kind)
