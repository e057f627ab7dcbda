"""Watches whether what pods store is what we computed for the requests that we sent there. Pure.

Dispatches and stores come in, disagreements come out. A key depends on token ids, model, adapter, salt and
block size; if an engine sees any of them differently than we do, it never holds what we look for, and nobody
would notice but by a hit rate of zero. Two signs are watched:

- Mismatch: we expect that the pod continues a chain that it holds (the parent) with a certain block. It
  continues that very chain with another one, no other request of ours in flight explains it, and the block
  that we expected never comes before the request is over. Then one of the two token windows is wrong, and
  both are named.
- Never hit: after many dispatches to a pod that stored blocks meanwhile, none of its stores met any key that
  we computed. Then even the root differs: model, adapter or block size, or the first token.

After either sign a pod is distrusted until several requests in a row found that it stores what we compute.
Only requests that need at least one new block are expectations; beyond the cap the oldest are forgotten,
which never makes a sign. Tokens are users' text: they leave this module as digests, keyed with a secret of
the process. Knows no clock, no pods' states and no metrics.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from indexer.applied import StoredRun
from indexer.keys import Keys

# Why the view of a pod is in doubt that computes other tokens than we do.
OTHER_TOKENS = "other_tokens"
WINDOW_TOKENS = 16
# A distrusted pod must store what we computed for so many requests in a row.
TRUSTED_AFTER = 8
_DIGEST_BYTES = 8
# An engine stores a prompt's blocks in order: if it stores none of the first ones, it stores none.
_WATCHED_BLOCKS = 8


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A pod stored other tokens than we computed, behind the same prefix.

    Attributes:
        request_id: The request whose block never came.
        pod: The pod.
        model: The base model.
        position: The prompt's first token that differs.
        computed: Digest of our token ids from there on, at most 16; comparable within this process only.
        stored: Digest of the engine's.
    """

    request_id: Hashable
    pod: str
    model: str
    position: int
    computed: str
    stored: str


@dataclass(frozen=True, slots=True)
class PodParity:
    """What is known of one pod.

    Attributes:
        pod: The pod.
        model: The model of its last dispatch.
        dispatches: Dispatches that needed a new block.
        met: Those of whose keys the pod stored one.
        unmet_in_a_row: Dispatches, since the last that was met, that ended while the pod stored other blocks.
        mismatches: Mismatches so far.
        last_mismatch: The last of them; None for none.
        never_hit: Whether so many were not met in a row that the keys must be wrong.
        distrusted: Whether a sign was seen, and not enough that tells otherwise since.
    """

    pod: str
    model: str
    dispatches: int
    met: int
    unmet_in_a_row: int
    mismatches: int
    last_mismatch: Mismatch | None
    never_hit: bool
    distrusted: bool


@dataclass(slots=True)
class _Pod:
    model: str = ""
    dispatches: int = 0
    met: int = 0
    unmet_in_a_row: int = 0
    mismatches: int = 0
    last_mismatch: Mismatch | None = None
    # Requests that must be met before the pod is trusted; 0: it is.
    to_be_met: int = 0
    # Requests in flight there, and how often it stored what none of them explains.
    waiting: dict[Hashable, _Expectation] = field(default_factory=dict)
    unexplained_runs: int = 0


@dataclass(slots=True)
class _Expectation:
    pod: str
    model: str
    parent: int
    keys: list[int]
    tokens: NDArray[np.uint32]
    start_tokens: int
    # Of the pod when it began.
    unexplained_runs: int
    # What the pod stored behind the parent instead; None: nothing.
    instead: NDArray[np.uint32] | None = None


class ParityWatch:
    """Expectations of requests in flight, and what became of them. Thread-safe.

    Args:
        max_expectations: Most requests that are watched at once.
        max_pods: Most pods that are remembered; those without dispatches for longest are forgotten.
        never_hit_dispatches: So many unmet dispatches in a row are a sign.
    """

    def __init__(
        self, *, max_expectations: int = 1024, max_pods: int = 4096, never_hit_dispatches: int = 20
    ) -> None:
        self._max_expectations = max_expectations
        self._max_pods = max_pods
        self._never_hit_dispatches = never_hit_dispatches
        self._secret = secrets.token_bytes(16)
        self._lock = threading.Lock()
        self._expected: dict[Hashable, _Expectation] = {}
        self._pods: OrderedDict[str, _Pod] = OrderedDict()

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
        """The request was sent to this pod, which must compute these blocks for it.

        Args:
            request_id: The request; said again, it is expected anew.
            pod: The pod.
            model: The base model.
            parent_key: Key of the last block that the pod holds, or the prompt's root.
            keys: The blocks behind it.
            tokens: Token ids of the first of them.
            start_tokens: Tokens of the prompt in front of it.
        """
        watched = keys[:_WATCHED_BLOCKS].tolist()
        if not watched:
            return
        with self._lock:
            if request_id in self._expected:
                self._forget(request_id)
            account = self._pods.get(pod)
            if account is None:
                account = self._pods[pod] = _Pod()
            self._pods.move_to_end(pod)
            account.model = model
            account.dispatches += 1
            expectation = _Expectation(
                pod, model, parent_key, watched, tokens, start_tokens, account.unexplained_runs
            )
            self._expected[request_id] = account.waiting[request_id] = expectation
            if len(self._expected) > self._max_expectations:
                self._forget(next(iter(self._expected)))
            if len(self._pods) > self._max_pods:
                self._forget_pod(next(iter(self._pods)))

    def waits_for(self, pod: str) -> bool:
        """Whether anything is expected of this pod."""
        account = self._pods.get(pod)
        return account is not None and bool(account.waiting)

    def distrusts(self, pod: str) -> bool:
        """Return whether this pod's predictions are not to be believed."""
        account = self._pods.get(pod)
        return account is not None and account.to_be_met > 0

    def stored(self, pod: str, runs: Sequence[StoredRun], keys: Sequence[int]) -> None:
        """The pod told of runs of new blocks, in order.

        Args:
            pod: The pod.
            runs: The runs.
            keys: The keys of all their blocks, maybe of others too.
        """
        with self._lock:
            account = self._pods.get(pod)
            if account is None or not account.waiting:
                return
            awaited = {key for it in account.waiting.values() for key in it.keys}
            # Nearly always these are others' blocks: then no run needs a look of its own.
            expected = not awaited.isdisjoint(keys)
            for run in runs:
                if expected and self._meets(account, set(run.keys.tolist())):
                    # A run that one expectation explains is no sign against the others.
                    continue
                account.unexplained_runs += 1
                for expectation in account.waiting.values():
                    if expectation.parent == run.parent and expectation.instead is None:
                        expectation.instead = run.tokens[: len(expectation.tokens)].copy()

    def settled(self, request_id: Hashable) -> Mismatch | None:
        """The request got its first token, or ended: what has not come by now does not come.

        Returns:
            The mismatch that this shows; None for none.
        """
        # Without the lock: mostly it was met before.
        if request_id not in self._expected:
            return None
        with self._lock:
            expectation = self._expected.pop(request_id, None)
            if expectation is None:
                return None
            account = self._pods[expectation.pod]
            del account.waiting[request_id]
            if expectation.unexplained_runs == account.unexplained_runs:
                return None
            account.unmet_in_a_row += 1
            mismatch = self._mismatch(request_id, expectation)
            if mismatch is not None:
                account.mismatches += 1
                account.last_mismatch = mismatch
            if mismatch is not None or account.unmet_in_a_row >= self._never_hit_dispatches:
                account.to_be_met = TRUSTED_AFTER
            return mismatch

    def dropped(self, request_id: Hashable) -> None:
        """The request failed, or was sent elsewhere: nothing is expected of it."""
        with self._lock:
            self._forget(request_id)

    def forget_pod(self, pod: str) -> None:
        """The pod is gone, or not what it was."""
        with self._lock:
            self._forget_pod(pod)

    def report(self) -> Sequence[PodParity]:
        """What is known of each pod."""
        with self._lock:
            return [
                PodParity(
                    pod,
                    account.model,
                    account.dispatches,
                    account.met,
                    account.unmet_in_a_row,
                    account.mismatches,
                    account.last_mismatch,
                    account.unmet_in_a_row >= self._never_hit_dispatches,
                    account.to_be_met > 0,
                )
                for pod, account in self._pods.items()
            ]

    def _meets(self, account: _Pod, stored: set[int]) -> bool:
        """Whether a run brought what was expected; nothing is expected any more of those that it met."""
        met = [each for each, it in account.waiting.items() if not stored.isdisjoint(it.keys)]
        for request_id in met:
            self._forget(request_id)
            account.met += 1
            account.unmet_in_a_row = 0
            account.to_be_met = max(0, account.to_be_met - 1)
        return bool(met)

    def _forget_pod(self, pod: str) -> None:
        account = self._pods.get(pod)
        if account is not None:
            for request_id in tuple(account.waiting):
                self._forget(request_id)
            del self._pods[pod]

    def _forget(self, request_id: Hashable) -> None:
        expectation = self._expected.pop(request_id, None)
        if expectation is None:
            return
        del self._pods[expectation.pod].waiting[request_id]

    def _mismatch(self, request_id: Hashable, expectation: _Expectation) -> Mismatch | None:
        """Return where the tokens differ; None if nothing was stored behind the parent, or equal tokens."""
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
            expectation.pod,
            expectation.model,
            expectation.start_tokens + position,
            self._digest(expectation.tokens[window]),
            self._digest(expectation.instead[window]),
        )

    def _digest(self, tokens: NDArray[np.uint32]) -> str:
        return blake2b(tokens.tobytes(), digest_size=_DIGEST_BYTES, key=self._secret).hexdigest()
