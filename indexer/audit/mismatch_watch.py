"""Detection of pods whose tokens or block keys differ from ours.

Input: dispatched requests and stored blocks. Output: mismatches. A block key depends on token ids, model,
adapter, salt and block size; if an engine differs in any of them, no prefix ever hits there, and only a hit
rate of zero would show it. There are two signs:

- Mismatch: we expect the pod to extend a cached prefix (the parent) by a certain block. The pod extends the
  same prefix by another block, no other request in flight explains that block, and the expected block does
  not arrive until a second after the request's end. Digests of both token windows are reported.
- Never hit: many requests in a row ended without a match, although the pod stored blocks. Then even the
  first key differs: model, adapter, block size or the first token.

After either sign the pod is mismatched until the blocks of several requests in a row match. Only requests
that need at least one new block create an expectation; above a limit the oldest expectations are dropped,
which is never a sign. Tokens are users' text: they leave this module only as digests, keyed with a secret of
the process.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import msgspec
import numpy as np
from numpy.typing import NDArray

from indexer.keys import Keys
from indexer.views.view_parts import StoredRun

# Reason by which the views of a mismatched pod are marked as invalid.
OTHER_TOKENS = "other_tokens"
WINDOW_TOKENS = 16
# Requests in a row whose blocks must match before a mismatched pod is trusted.
TRUSTED_AFTER = 8
# A request's events may arrive after its answer; other requests decode behind the same prefix meanwhile.
EVENTS_LATE_MAX_S = 1.0
_DIGEST_BYTES = 8
# Blocks compared per request. Engines store a prompt's blocks in order, so the first ones are enough.
_WATCHED_BLOCKS = 8
_LINES_MAX = 20


class DispatchKey(msgspec.Struct, frozen=True, order=True, cache_hash=True):
    """Id of one dispatch of a request; clients may reuse a request id while its first use is in flight."""

    request_id: str
    dispatched_s: float

    def __str__(self) -> str:
        return self.request_id


@dataclass(frozen=True, slots=True)
class SentPrompt:
    """Prompt of a dispatched request, whose blocks the pod should store."""

    model: str
    lora_name: str | None  # name of the adapter; None: the base model
    cache_salt: str | None
    token_ids: NDArray[np.uint32]
    cached_blocks: int  # length of the prefix that the pod holds, speculative entries included
    held_blocks: int = 0  # length of the prefix that the pod's events have confirmed


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Block of a pod whose tokens differ from ours behind the same prefix."""

    request_id: Hashable  # request whose expected block did not arrive
    pod: str
    model: str
    position: int  # index of the prompt's first differing token
    computed: str  # digest of at most 16 of our token ids from there on; comparable within this process only
    stored: str  # digest of the engine's token ids at the same place

    def __str__(self) -> str:
        return (
            f"token mismatch: pod={self.pod} model={self.model} request={self.request_id} "
            f"first_differing_token={self.position} our_digest={self.computed} "
            f"engine_digest={self.stored}; cache hits of this pod are not used until its tokens match; "
            "compare tokenizer and chat template"
        )


@dataclass(slots=True)
class WatchedPod:
    """Expectations and mismatches of one pod."""

    pod: str
    model: str = ""
    # Requests since the last match that ended although the pod stored other blocks.
    misses_in_a_row: int = 0
    last_mismatch: Mismatch | None = None
    never_hit: bool = False  # whether so many requests in a row missed that the keys must differ
    matches_needed: int = 0  # requests that must match before the pod is trusted; 0: it is trusted
    waiting: dict[Hashable, _Expectation] = field(default_factory=dict)
    unexplained_runs: int = 0  # stored runs that match no expectation

    @property
    def mismatched(self) -> bool:
        return self.matches_needed > 0

    def __str__(self) -> str:
        return (
            f"no stored block matches: pod={self.pod} model={self.model} "
            f"requests={self.misses_in_a_row}; no prefix will hit at this pod; compare model name, adapter "
            "name and tokenizer"
        )


@dataclass(slots=True)
class _Expectation:
    watched: WatchedPod
    model: str
    parent: int
    keys: list[int]
    tokens: NDArray[np.uint32]
    start_tokens: int
    # The pod's `unexplained_runs` when the request was dispatched.
    unexplained_runs: int
    # Tokens that the pod stored behind the parent instead; None: none.
    instead: NDArray[np.uint32] | None = None
    ended_s: float | None = None  # when the request ended; its block may still arrive
    is_suspect: bool = False  # whether the pod stored unexplained runs until then


@dataclass(eq=False, kw_only=True)
class MismatchWatch:
    """Expected blocks of the requests in flight, compared with what the pods store. Thread-safe."""

    max_expectations: int = 1024
    max_pods: int = 4096  # above it the pods without dispatches for longest are dropped
    never_hit_dispatches: int = 20  # requests in a row without a match that are a sign

    def __post_init__(self) -> None:
        self._secret = secrets.token_bytes(16)
        self._lock = threading.Lock()
        self._expected: dict[Hashable, _Expectation] = {}
        self._pods: OrderedDict[str, WatchedPod] = OrderedDict()

    def expect(
        self,
        request_id: Hashable,
        pod: str,
        model: str,
        parent_key: int,
        keys: Keys,
        tokens: NDArray[np.uint32],
        *,
        start_tokens: int = 0,
    ) -> None:
        """Record the blocks that a pod should store for a dispatched request.

        Args:
            request_id: Id of the request; a second call replaces its expectation.
            parent_key: Key of the last block that the pod holds, or the prompt's root.
            tokens: Token ids of the first expected block.
            start_tokens: Number of the prompt's tokens in front of that block.
        """
        first_keys = keys[:_WATCHED_BLOCKS].tolist()
        if not first_keys:
            return
        with self._lock:
            self._forget(request_id)
            watched = self._pods.setdefault(pod, WatchedPod(pod))
            self._pods.move_to_end(pod)
            watched.model = model
            expectation = _Expectation(
                watched, model, parent_key, first_keys, tokens, start_tokens, watched.unexplained_runs
            )
            self._expected[request_id] = watched.waiting[request_id] = expectation
            if len(self._expected) > self.max_expectations:
                self._forget(next(iter(self._expected)))
            if len(self._pods) > self.max_pods:
                self._forget_pod(next(iter(self._pods)))

    def waits_for(self, pod: str) -> bool:
        watched = self._pods.get(pod)
        return watched is not None and bool(watched.waiting)

    def is_mismatched(self, pod: str) -> bool:
        watched = self._pods.get(pod)
        return watched is not None and watched.mismatched

    def stored(self, pod: str, runs: Sequence[StoredRun], keys: Sequence[int], stride: int = 1) -> int:
        """Compare a pod's new blocks with its expectations.

        Args:
            runs: Stored runs, in order.
            keys: Keys of all their blocks, possibly of others too.
            stride: Index blocks per block of the engine.

        Returns:
            How many runs begin one engine block later than expected: the engine served that block.
        """
        late = 0
        with self._lock:
            watched = self._pods.get(pod)
            if watched is None or not watched.waiting:
                return 0
            awaited = {key for it in watched.waiting.values() for key in it.keys}
            # Nearly always these are blocks of other requests, and no run must be compared.
            expected = not awaited.isdisjoint(keys)
            for run in runs:
                late += expected and any(
                    it.keys[stride - 1 : stride + 1] == [run.parent, int(run.keys[0])]
                    for it in watched.waiting.values()
                )
                if expected and self._meets(watched, set(run.keys.tolist())):
                    # A run that one expectation explains says nothing about the others.
                    continue
                watched.unexplained_runs += 1
                for expectation in watched.waiting.values():
                    is_open = expectation.instead is None and expectation.ended_s is None
                    if is_open and expectation.parent == run.parent:
                        expectation.instead = run.tokens[: len(expectation.tokens)].copy()
        return late

    def settle(self, request_id: Hashable, now_s: float) -> None:
        """End a request, at its first token or its end; `judge` compares once its events have arrived."""
        # Checked without the lock, because most expectations have matched before.
        if request_id not in self._expected:
            return
        with self._lock:
            expectation = self._expected.get(request_id)
            if expectation is None or expectation.ended_s is not None:
                return
            expectation.ended_s = now_s
            expectation.is_suspect = expectation.unexplained_runs != expectation.watched.unexplained_runs

    def judge(self, now_s: float) -> list[Mismatch]:
        """Return the mismatches of requests that ended at least a second ago, whose blocks did not arrive."""
        with self._lock:
            due = [
                request_id
                for request_id, expectation in self._expected.items()
                if expectation.ended_s is not None and now_s - expectation.ended_s >= EVENTS_LATE_MAX_S
            ]
            return [found for request_id in due if (found := self._judged(request_id)) is not None]

    def _judged(self, request_id: Hashable) -> Mismatch | None:
        expectation = self._forget(request_id)
        assert expectation is not None
        watched = expectation.watched
        if not expectation.is_suspect:
            return None
        watched.misses_in_a_row += 1
        watched.never_hit = watched.misses_in_a_row >= self.never_hit_dispatches
        mismatch = self._mismatch(request_id, expectation)
        watched.last_mismatch = mismatch or watched.last_mismatch
        if mismatch is not None or watched.never_hit:
            watched.matches_needed = TRUSTED_AFTER
        return mismatch

    def drop(self, request_id: Hashable) -> None:
        with self._lock:
            self._forget(request_id)

    def forget_pod(self, pod: str) -> None:
        """Drop the state of a pod that was removed or replaced."""
        with self._lock:
            self._forget_pod(pod)

    def report(self) -> Sequence[WatchedPod]:
        with self._lock:
            return list(self._pods.values())

    def details(self) -> list[str]:
        """Return one line per mismatched pod, at most 20."""
        mismatched = [watched for watched in self.report() if watched.mismatched]
        return [str(watched.last_mismatch or watched) for watched in mismatched[:_LINES_MAX]]

    def _meets(self, watched: WatchedPod, stored: set[int]) -> bool:
        """Remove the expectations that a stored run meets; return whether there were any."""
        met = [each for each, it in watched.waiting.items() if not stored.isdisjoint(it.keys)]
        for request_id in met:
            self._forget(request_id)
            watched.misses_in_a_row, watched.never_hit = 0, False
            watched.matches_needed = max(0, watched.matches_needed - 1)
        return bool(met)

    def _forget_pod(self, pod: str) -> None:
        if (watched := self._pods.pop(pod, None)) is not None:
            for request_id in tuple(watched.waiting):
                self._forget(request_id)

    def _forget(self, request_id: Hashable) -> _Expectation | None:
        expectation = self._expected.pop(request_id, None)
        if expectation is not None:
            del expectation.watched.waiting[request_id]
        return expectation

    def _mismatch(self, request_id: Hashable, expectation: _Expectation) -> Mismatch | None:
        """Return where the tokens differ; None if they are equal or nothing was stored behind the parent."""
        if expectation.instead is None:
            return None
        length = min(len(expectation.tokens), len(expectation.instead))
        differing = np.flatnonzero(expectation.tokens[:length] != expectation.instead[:length])
        if not len(differing):
            return None
        position = int(differing[0])
        window = slice(position, position + WINDOW_TOKENS)
        return Mismatch(
            request_id,
            expectation.watched.pod,
            expectation.model,
            expectation.start_tokens + position,
            self._digest(expectation.tokens[window]),
            self._digest(expectation.instead[window]),
        )

    def _digest(self, tokens: NDArray[np.uint32]) -> str:
        return blake2b(tokens.tobytes(), digest_size=_DIGEST_BYTES, key=self._secret).hexdigest()
