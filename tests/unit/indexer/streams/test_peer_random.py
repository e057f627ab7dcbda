"""Views copied from a peer at any point of a history: both stay equal under all later events."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from indexer.views.view_parts import Entry, decode_entry
from tests.support.depth import examples
from tests.support.indexer.peer_views import DIGEST, MODEL, PODS, TIERS, Views, assert_same, payload, removal
from tests.support.indexer.views import read_lines
from tests.unit.indexer.views.test_applier import KEYS, batches

POD, OTHER = PODS


@settings(max_examples=examples(40), deadline=None)
@given(data=st.data(), grouped=st.booleans())
def test_a_copied_view_goes_on_like_the_one_it_was_copied_from(data: st.DataObject, grouped: bool) -> None:
    """A copied view and its origin have the same content after all later events."""
    peer, ours = Views(), Views()
    payloads = st.lists(batches(0, grouped), min_size=1, max_size=3)
    # Both sides start with different blocks and names of other pods.
    peer.apply(OTHER, data.draw(payloads))
    ours.apply(OTHER, data.draw(payloads))
    copied = False
    for _ in range(data.draw(st.integers(2, 8))):
        batch = data.draw(payloads)
        outcome = peer.apply(POD, batch)
        if copied:
            assert_same(outcome, ours.apply(POD, batch))
        elif peer.is_listed(POD) and data.draw(st.integers(0, 3)):
            ours.copy(peer, POD)
            copied = True
        if copied:
            assert ours.held(POD, KEYS[MODEL,]) == peer.held(POD, KEYS[MODEL,])
            assert ours.copies(POD) == peer.copies(POD)
            ours_groups, peer_groups = (side.states[POD].view.groups for side in (ours, peer))
            assert ours_groups == peer_groups
    event(f"copied: {copied}")


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data(), grouped=st.booleans())
def test_a_view_goes_on_by_what_another_recorded(data: st.DataObject, grouped: bool) -> None:
    """Changes recorded by one router and applied by another give the same blocks, copies and groups."""
    peer, ours = Views(), Views()
    payloads = st.lists(batches(0, grouped), min_size=1, max_size=3)
    peer.apply(POD, data.draw(payloads))
    assume(peer.is_listed(POD))
    ours.copy(peer, POD)
    recorder, view = peer.states[POD].change_log, ours.states[POD].view
    recorder.begin()
    for _ in range(data.draw(st.integers(1, 8))):
        peer.apply(POD, data.draw(payloads))
        entry = Entry(7, DIGEST, peer.states[POD].view.facts(), recorder.take())
        _, damage = view.apply_entry(decode_entry(msgspec.msgpack.encode(entry), len(TIERS.names)))
        assert damage is None
        assert ours.held(POD, KEYS[MODEL,]) == peer.held(POD, KEYS[MODEL,])
        assert ours.copies(POD) == peer.copies(POD)
        assert view.groups == peer.states[POD].view.groups


@pytest.mark.parametrize("capture", ["vllm_run1_frames.jsonl.gz", "vllm_run3_frames.jsonl.gz"])
def test_captures_of_a_real_engine_may_be_recorded(capture: str) -> None:
    """Changes recorded from a real vLLM's events give the same view at another router."""
    peer, ours = Views(16), Views(16)
    state = peer.states[POD]
    state.change_log.begin()
    payloads = [bytes.fromhex(frame["frames"][2]) for frame in read_lines(capture)]
    for start in range(0, len(payloads), 5):
        peer.apply(POD, payloads[start : start + 5])
        entry = Entry(7, DIGEST, state.view.facts(), state.change_log.take())
        ours.states[POD].view.apply_entry(decode_entry(msgspec.msgpack.encode(entry), len(TIERS.names)))
        assert ours.copies(POD) == peer.copies(POD)
    assert peer.copies(POD)


@pytest.mark.parametrize("capture", ["vllm_run1_frames.jsonl.gz", "vllm_run3_frames.jsonl.gz"])
def test_captures_of_a_real_engine_may_be_cut_anywhere(capture: str) -> None:
    """A copy made at any point of a real vLLM's events stays equal, hybrid groups included."""
    payloads = [bytes.fromhex(frame["frames"][2]) for frame in read_lines(capture)]
    cuts = 0
    for cut in np.linspace(1, len(payloads) - 1, 7, dtype=int).tolist():
        peer, ours = Views(16), Views(16)
        peer.apply(POD, payloads[:cut])
        if not peer.is_listed(POD):
            continue
        cuts += 1
        ours.copy(peer, POD)
        for start in range(cut, len(payloads), 5):
            batch = payloads[start : start + 5]
            assert_same(peer.apply(POD, batch), ours.apply(POD, batch))
        assert ours.copies(POD) == peer.copies(POD)
        assert ours.states[POD].view.groups == peer.states[POD].view.groups
    assert cuts


def test_a_copy_replaces_what_was_there() -> None:
    """A copied view replaces an earlier view of the pod entirely."""
    peer, ours = Views(), Views()
    ours.apply(POD, [payload((1, 2, 3))])
    peer.apply(POD, [payload((2, 1))])
    ours.copy(peer, POD)
    assert ours.copies(POD) == peer.copies(POD)
    assert len(ours.copies(POD)) == 2


def test_a_view_of_many_parts_is_copied_whole() -> None:
    """A view with more blocks than fit in one part is copied with its copies."""
    peer, ours = Views(), Views()
    long = tuple(number % 3 + 1 for number in range(9000))
    peer.apply(POD, [payload(long), payload(long[:100]), removal(long[:50]), removal(long[:50])])
    ours.copy(peer, POD)
    assert len(ours.copies(POD)) == 9000 - 50
    assert ours.copies(POD) == peer.copies(POD)
    child = payload((*long[:10], 1), start=10)
    assert_same(peer.apply(POD, [child]), ours.apply(POD, [child]))
    assert ours.copies(POD) == peer.copies(POD)
