"""What is known of conversations: bounded, and kept for those that go on."""

from __future__ import annotations

import json

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tokenization.beginnings import NOWHERE, Beginnings, Remembered
from tokenization.message_ends import messages_digest


class Sized(msgspec.Struct, frozen=True):
    """A beginning of a size."""

    size_bytes: int


def listed(*words: str) -> memoryview:
    """Messages as JSON text, up to the last one's end."""
    return memoryview(json.dumps([{"role": "user", "content": word} for word in words]).encode())[:-1]


def put(memory: Beginnings[Sized], messages: memoryview, size_bytes: int) -> bool:
    """Remembers messages as a conversation does; whether some of them were known."""
    known, end, digest = memory.find(messages, (), None)
    memory.put(Sized(size_bytes), digest, None, end)
    return known is not None


def test_a_conversation_that_goes_on_takes_no_more_room_than_its_last_turn() -> None:
    """As many conversations as fit with one beginning each are known however many turns they have."""
    memory: Beginnings[Sized] = Beginnings(4000)
    for turn in range(1, 20):
        for talk in range(30):
            words = [f"{talk}.{at}" for at in range(2 * turn)]
            assert put(memory, listed(*words), 100) == (turn > 1)
            assert memory.used_bytes <= 4000


def test_what_conversations_have_gone_on_from_is_known_as_long_as_there_is_room() -> None:
    """A last question asked again, or in another way, finds what was in front of it."""
    memory: Beginnings[Sized] = Beginnings(4000)
    put(memory, listed("a"), 100)
    put(memory, listed("a", "b", "c"), 100)
    known, end, _ = memory.find(listed("a", "x", "y"), (), None)
    assert known == Sized(100)
    assert end == (len(listed("a")), messages_digest(listed("a")))


def test_what_others_might_share_pushes_out_no_conversation() -> None:
    """Beginnings that nobody has asked for twice have a part of the memory to themselves."""
    memory: Beginnings[Sized] = Beginnings(4000)
    assert not put(memory, listed("first"), 100)
    for number in range(100):
        memory.share(Sized(100), messages_digest(listed(f"{number}")), None)
    assert memory.used_bytes == 1100
    assert put(memory, listed("first", "so", "why"), 100)
    assert put(memory, listed("99", "so", "why"), 100)
    assert not put(memory, listed("0", "so", "why"), 100)


def test_what_is_shared_stays_while_it_is_asked_for() -> None:
    """A system prompt that every conversation begins with outlives any number of them."""
    memory: Beginnings[Sized] = Beginnings(4000)
    memory.share(Sized(100), messages_digest(listed("system")), None)
    for talk in range(100):
        assert put(memory, listed("system", f"{talk}"), 100)
        assert put(memory, listed("system", f"{talk}", "so", "why"), 100)


@given(st.lists(st.tuples(st.sampled_from("pgs"), st.integers(0, 5), st.integers(0, 1500)), max_size=40))
def test_the_bytes_in_use_are_those_of_what_is_kept(steps: list[tuple[str, int, int]]) -> None:
    """Whatever comes, in whatever order, the count is right and within the bounds."""
    memory: Beginnings[Sized] = Beginnings(4000)
    for kind, name, size_bytes in steps:
        words = [f"{name}"] if kind == "p" else [f"{name}", "so", f"{size_bytes % 3}"]
        if kind == "s":
            memory.share(Sized(size_bytes), messages_digest(listed(*words)), None)
        else:
            put(memory, listed(*words), size_bytes)
        kept = [*memory._last._beginnings.values(), *memory._earlier._beginnings.values()]
        assert memory.used_bytes == sum(beginning.size_bytes for beginning in kept) <= 4000
    memory.bound(1000)
    assert memory.used_bytes <= 1000
    assert memory.find(memoryview(b"[1"), (), None)[:2] == (None, NOWHERE)


def test_a_memory_tells_what_was_known_what_was_new_and_what_had_to_go() -> None:
    """Who reads its counters sees whether conversations come back after they were forgotten."""
    memory: Beginnings[Sized] = Beginnings(400)
    for talk in range(3):
        put(memory, listed(f"{talk}"), 100)
    assert memory.remembered == Remembered(used_bytes=300, known=0, new=3, pushed_out=0)
    put(memory, listed("3", "and", "on"), 100)
    assert not put(memory, listed("0", "and", "on"), 100)
    assert put(memory, listed("3", "and", "on", "so", "why"), 100)
    assert memory.remembered.pushed_out == 2
    assert (memory.remembered.known, memory.remembered.new) == (1, 5)
