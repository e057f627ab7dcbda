"""Mismatch watch: reports pods whose tokens differ from ours, and no others."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.audit.mismatch_watch import EVENTS_LATE_MAX_S, TRUSTED_AFTER, Mismatch, MismatchWatch, WatchedPod
from indexer.keys import BlockHasher, Keys
from indexer.views.view_parts import StoredRun

POD, OTHER, MODEL = "10.0.0.1:8000", "10.0.0.2:8000", "m"
HASHER = BlockHasher(4, 1)
ROOT = HASHER.root(MODEL, None, None)


def tokens(*numbers: int) -> np.ndarray:
    """Return token ids as the watch expects them."""
    return np.array(numbers, np.uint32)


def chain(prompt: np.ndarray, parent: int = ROOT) -> Keys:
    """Return the keys of the prompt's blocks."""
    return HASHER.chain(parent, prompt)


def run(prompt: np.ndarray, parent: int = ROOT) -> StoredRun:
    """Return the prompt's blocks as one stored run."""
    return StoredRun(parent, chain(prompt, parent), prompt)


def report_stored(watch: MismatchWatch, *runs: StoredRun, pod: str = POD) -> None:
    """Report these runs of the pod as one batch."""
    watch.stored(pod, runs, [key for each in runs for key in each.keys.tolist()])


def settled(watch: MismatchWatch, request_id: str) -> Mismatch | None:
    """End a request and judge it after its events must have arrived."""
    watch.settle(request_id, 0.0)
    return next(iter(watch.judge(EVENTS_LATE_MAX_S)), None)


OURS = tokens(1, 2, 3, 4, 5, 6, 7, 8)
THEIRS = tokens(1, 2, 9, 4, 5, 6, 7, 8)


def expect(watch: MismatchWatch, request_id: str, prompt: np.ndarray = OURS, pod: str = POD) -> None:
    """Record the prompt as sent to a pod that holds none of it."""
    watch.expect(request_id, pod, MODEL, ROOT, chain(prompt), prompt[:4])


def store(watch: MismatchWatch, prompt: np.ndarray, pod: str = POD) -> None:
    """Let the pod store the prompt's blocks."""
    report_stored(watch, run(prompt), pod=pod)


def known(watch: MismatchWatch, pod: str = POD) -> WatchedPod:
    """Return the watch's state of the pod."""
    return next(parity for parity in watch.report() if parity.pod == pod)


def test_blocks_that_come_as_computed_are_no_sign() -> None:
    """A request whose first block arrives matches, whatever else is stored."""
    watch = MismatchWatch()
    expect(watch, "a")
    store(watch, THEIRS)
    store(watch, OURS)
    assert settled(watch, "a") is None
    assert not watch.waits_for(POD)
    assert known(watch).last_mismatch is None


def test_other_tokens_behind_the_same_prefix_are_a_mismatch() -> None:
    """A mismatch names the first differing position and digests of both windows, but no tokens."""
    watch = MismatchWatch()
    expect(watch, "a")
    store(watch, THEIRS)
    mismatch = settled(watch, "a")
    assert mismatch is not None
    assert (mismatch.request_id, mismatch.pod, mismatch.model) == ("a", POD, MODEL)
    assert mismatch.position == 2
    assert isinstance(mismatch.computed, str)
    assert isinstance(mismatch.stored, str)
    assert mismatch.computed != mismatch.stored
    assert known(watch).last_mismatch == mismatch


def test_a_digest_is_the_processs_own() -> None:
    """Digests of equal tokens are equal within one watch, and differ between two watches."""
    report_stored = []
    for watch in (first := MismatchWatch(), first, MismatchWatch()):
        expect(watch, "a")
        store(watch, THEIRS)
        mismatch = settled(watch, "a")
        assert mismatch is not None
        report_stored.append((mismatch.computed, mismatch.stored))
    assert report_stored[0] == report_stored[1]
    assert report_stored[0][0] != report_stored[2][0]
    assert report_stored[0][1] != report_stored[2][1]


def test_a_pod_is_mismatched_until_requests_in_a_row_match() -> None:
    """After a mismatch a pod is trusted again when the blocks of several requests in a row have matched."""
    watch = MismatchWatch()
    assert not watch.is_mismatched(POD)
    for _ in range(2):
        expect(watch, "a")
        store(watch, THEIRS)
        settled(watch, "a")
        for number in range(TRUSTED_AFTER):
            assert watch.is_mismatched(POD)
            expect(watch, str(number))
            store(watch, OURS)
        assert not watch.is_mismatched(POD)
        assert not known(watch).mismatched


def test_a_mismatch_is_found_behind_a_cached_prefix_too() -> None:
    """The parent of the expected block is the last block that the pod holds."""
    watch = MismatchWatch()
    parent = int(chain(OURS)[0])
    watch.expect("a", POD, MODEL, parent, chain(OURS)[1:], OURS[4:], start_tokens=4)
    report_stored(watch, run(tokens(5, 6, 7, 9), parent))
    mismatch = settled(watch, "a")
    assert mismatch is not None
    assert mismatch.position == 7


def test_another_request_in_flight_explains_a_store() -> None:
    """Two prompts with different first blocks are no mismatch of each other."""
    watch = MismatchWatch()
    expect(watch, "a", OURS)
    expect(watch, "b", THEIRS)
    store(watch, THEIRS)
    assert settled(watch, "b") is None
    assert settled(watch, "a") is None
    assert known(watch).last_mismatch is None


def test_runs_of_one_batch_are_compared_separately() -> None:
    """A run that matches one request does not excuse another run of the same batch."""
    watch = MismatchWatch()
    parent = int(chain(OURS)[0])
    expect(watch, "a")
    watch.expect("b", POD, MODEL, parent, chain(tokens(5, 6, 7, 9), parent), tokens(5, 6, 7, 9))
    watch.expect("c", POD, MODEL, ROOT, chain(THEIRS), THEIRS[:4])
    report_stored(watch, run(OURS), run(tokens(5, 6, 8, 9), parent), run(tokens(5, 5, 5, 5), parent))
    assert settled(watch, "a") is None
    mismatch = settled(watch, "b")
    assert mismatch is not None
    assert mismatch.position == 2
    assert settled(watch, "c") is None
    assert known(watch).misses_in_a_row == 2


def test_a_pod_that_stored_nothing_shows_nothing() -> None:
    """A request that ended without any store is no sign; stores of other pods do not count."""
    watch = MismatchWatch()
    expect(watch, "a")
    store(watch, THEIRS, OTHER)
    assert settled(watch, "a") is None
    assert known(watch).misses_in_a_row == 0


def test_blocks_may_arrive_after_the_answer() -> None:
    """An answer may overtake its events: a block that another request decoded meanwhile is no mismatch."""
    watch = MismatchWatch()
    expect(watch, "a")
    store(watch, THEIRS)
    watch.settle("a", 5.0)
    assert watch.judge(5.0 + EVENTS_LATE_MAX_S / 2) == []
    store(watch, OURS)
    assert watch.judge(9.0) == []
    assert known(watch).misses_in_a_row == 0


def test_blocks_stored_after_the_end_are_no_sign() -> None:
    """Blocks stored behind the prefix after a request's end belong to other requests."""
    watch = MismatchWatch()
    expect(watch, "a")
    store(watch, tokens(7, 7, 7, 7), POD)
    report_stored(watch, run(OURS, HASHER.root("other")))
    watch.settle("a", 5.0)
    store(watch, THEIRS)
    (mismatch,) = watch.judge(9.0)
    assert mismatch.position == 0


def test_dropped_requests_show_nothing() -> None:
    """A request that failed or was sent elsewhere has no expectation any more."""
    watch = MismatchWatch()
    expect(watch, "a")
    store(watch, THEIRS)
    watch.drop("a")
    assert settled(watch, "a") is None
    assert known(watch).last_mismatch is None


def test_keys_that_never_match_are_reported() -> None:
    """Stores under another root, for example another model's name, are reported after enough requests."""
    watch = MismatchWatch(never_hit_dispatches=3)
    elsewhere = HASHER.root("other", None, None)
    for number in range(3):
        assert not (number and known(watch).never_hit)
        expect(watch, str(number))
        report_stored(watch, run(OURS, elsewhere))
        assert settled(watch, str(number)) is None
    assert known(watch).never_hit
    expect(watch, "met")
    store(watch, OURS)
    assert not known(watch).never_hit


def test_a_pod_that_is_gone_is_forgotten() -> None:
    """The expectations of a removed pod are dropped with it."""
    watch = MismatchWatch()
    expect(watch, "a")
    watch.forget_pod(POD)
    assert watch.report() == []
    assert settled(watch, "a") is None


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["expect", "store", "settle", "drop", "forget"]),
        st.integers(0, 5),
        st.integers(0, 3),
        st.sampled_from([POD, OTHER, "third"]),
    ),
    max_size=60,
)


@given(_STEPS)
@settings(deadline=None)
def test_what_is_watched_is_bounded(steps: list[tuple[str, int, int, str]]) -> None:
    """The limits of expectations and pods hold after any history, and ended requests leave nothing."""
    watch = MismatchWatch(max_expectations=3, max_pods=2)
    for what, request, prompt, pod in steps:
        ids = np.arange(8, dtype=np.uint32) + prompt
        if what == "expect":
            expect(watch, str(request), ids, pod)
        elif what == "store":
            store(watch, ids, pod)
        elif what == "settle":
            settled(watch, str(request))
        elif what == "drop":
            watch.drop(str(request))
        else:
            watch.forget_pod(pod)
        assert len(watch.report()) <= 2
        assert sum(len(account.waiting) for account in watch.report()) <= 3
    for request in range(6):
        settled(watch, str(request))
    assert not any(account.waiting for account in watch.report())
