"""Watches whether what pods store is what we computed for the requests that we sent there.

Dispatches and stores come in, disagreements come out: to the caller, to metrics, to the log now and then,
and to /ready. A key depends on token ids, model, adapter, salt and block size; if an engine sees any of them
differently than we do, it never holds what we look for, and nobody would notice but by a hit rate of zero.
Two signs are watched:

- Mismatch: we expect that the pod continues a chain that it holds (the parent) with a certain block. It
  continues that very chain with another one, no other request of ours in flight explains it, and the block
  that we expected never comes before the request is over. Then one of the two token windows is wrong, and
  both are named.
- Never hit: after many dispatches to a pod that stored blocks meanwhile, none of its stores met any key that
  we computed. Then even the root differs: model, adapter or block size, or the first token.

After either sign a pod is distrusted until several requests in a row found that it stores what we compute.
Only requests that need at least one new block are expectations; beyond the cap the oldest are forgotten,
which never makes a sign. Tokens are users' text: they leave this module as digests, keyed with a secret of
the process.
"""

from __future__ import annotations

import logging
import math
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
from indexer.metrics import IndexerMetrics
from indexer.views.view_parts import StoredRun

_log = logging.getLogger(__name__)

# Why the view of a pod is in doubt that computes other tokens than we do.
OTHER_TOKENS = "other_tokens"
WINDOW_TOKENS = 16
# A distrusted pod must store what we computed for so many requests in a row.
TRUSTED_AFTER = 8
_DIGEST_BYTES = 8
# An engine stores a prompt's blocks in order: if it stores none of the first ones, it stores none.
_WATCHED_BLOCKS = 8
_LINES_MAX = 20


class DispatchKey(msgspec.Struct, frozen=True, order=True, cache_hash=True):
    """One sending of a request: clients use an id again, also while its first use is in flight."""

    request_id: str
    dispatched_s: float

    def __str__(self) -> str:
        return self.request_id


@dataclass(frozen=True, slots=True)
class SentPrompt:
    """A prompt as we see it; the pod should see the same."""

    model: str
    lora_name: str | None  # the adapter's name; None for the base model
    cache_salt: str | None
    token_ids: NDArray[np.uint32]
    cached_blocks: int  # blocks of it that the pod was said to hold
    held_blocks: int = 0  # so many of these the pod itself has told of; the others are assumed


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A pod stored other tokens than we computed, behind the same prefix."""

    request_id: Hashable  # the request whose block never came
    pod: str
    model: str
    position: int  # the prompt's first token that differs
    computed: str  # digest of our token ids from there on, at most 16; comparable within this process only
    stored: str

    def __str__(self) -> str:
        return (
            f"pod {self.pod} computes other tokens of model {self.model!r} than we do (request "
            f"{self.request_id}): they differ from token {self.position} of the prompt on (digest of "
            f"ours {self.computed}, of the engine's {self.stored}); its predictions are not believed "
            "meanwhile; compare tokenizer and template"
        )


@dataclass(slots=True)
class WatchedPod:
    """State of one pod."""

    pod: str
    model: str = ""
    # Dispatches, since the last that was met, that ended while the pod stored other blocks.
    misses_in_a_row: int = 0
    last_mismatch: Mismatch | None = None
    never_hit: bool = False  # whether so many were not met in a row that the keys must be wrong
    matches_needed: int = 0  # requests that must be met before the pod is trusted; 0: it is
    waiting: dict[Hashable, _Expectation] = field(default_factory=dict)
    unexplained_runs: int = 0  # how often it stored what none of them explains

    @property
    def mismatched(self) -> bool:
        return self.matches_needed > 0

    def __str__(self) -> str:
        return (
            f"pod {self.pod} stores blocks, but for the last {self.misses_in_a_row} requests of model "
            f"{self.model!r} none of the blocks that we computed: no prefix will ever hit there; compare "
            "model name, adapter name and tokenizer"
        )


@dataclass(slots=True)
class _Expectation:
    account: WatchedPod
    model: str
    parent: int
    keys: list[int]
    tokens: NDArray[np.uint32]
    start_tokens: int
    # Of the pod when it began.
    unexplained_runs: int
    # What the pod stored behind the parent instead; None: nothing.
    instead: NDArray[np.uint32] | None = None


class MismatchWatch:
    """Expectations of requests in flight, and what became of them. Thread-safe."""

    def __init__(
        self,
        metrics: IndexerMetrics,
        *,
        max_expectations: int = 1024,
        max_pods: int = 4096,
        never_hit_dispatches: int = 20,
        warn_every_s: float = 60.0,
    ) -> None:
        self._metrics = metrics
        self._max_expectations = max_expectations
        self._max_pods = max_pods  # those without dispatches for longest are forgotten
        self._never_hit_dispatches = never_hit_dispatches  # so many unmet in a row are a sign
        self._warn_every_s = warn_every_s  # for warnings of one kind
        self._warned_s: dict[type, float] = {}
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
        """The request was sent to this pod, which must compute these blocks for it.

        Args:
            request_id: The request; said again, it is expected anew.
            parent_key: Key of the last block that the pod holds, or the prompt's root.
            tokens: Token ids of the first of them.
            start_tokens: Tokens of the prompt in front of it.
        """
        watched = keys[:_WATCHED_BLOCKS].tolist()
        if not watched:
            return
        with self._lock:
            self._forget(request_id)
            account = self._pods.setdefault(pod, WatchedPod(pod))
            self._pods.move_to_end(pod)
            account.model = model
            expectation = _Expectation(
                account, model, parent_key, watched, tokens, start_tokens, account.unexplained_runs
            )
            self._expected[request_id] = account.waiting[request_id] = expectation
            if len(self._expected) > self._max_expectations:
                self._forget(next(iter(self._expected)))
            if len(self._pods) > self._max_pods:
                self._forget_pod(next(iter(self._pods)))

    def waits_for(self, pod: str) -> bool:
        account = self._pods.get(pod)
        return account is not None and bool(account.waiting)

    def is_mismatched(self, pod: str) -> bool:
        account = self._pods.get(pod)
        return account is not None and account.mismatched

    def stored(self, pod: str, runs: Sequence[StoredRun], keys: Sequence[int]) -> None:
        """The pod told of runs of new blocks, in order; `keys`: of all their blocks, maybe of others too."""
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

    def settle(self, request_id: Hashable, now_s: float) -> Mismatch | None:
        """The request got its first token, or ended: what has not come by now does not come."""
        # Without the lock: mostly it was met before.
        if request_id not in self._expected:
            return None
        with self._lock:
            expectation = self._forget(request_id)
            if expectation is None or expectation.unexplained_runs == expectation.account.unexplained_runs:
                return None
            account = expectation.account
            account.misses_in_a_row += 1
            account.never_hit = account.misses_in_a_row >= self._never_hit_dispatches
            mismatch = self._mismatch(request_id, expectation)
            if mismatch is not None:
                account.last_mismatch = mismatch
            if mismatch is not None or account.never_hit:
                account.matches_needed = TRUSTED_AFTER
        if mismatch is not None:
            self._metrics.parity_mismatches.labels(mismatch.pod, mismatch.model).inc()
            self._warn(mismatch, now_s)
        return mismatch

    def drop(self, request_id: Hashable) -> None:
        with self._lock:
            self._forget(request_id)

    def forget_pod(self, pod: str) -> None:
        """The pod is gone, or not what it was; its series go too."""
        with self._lock:
            self._forget_pod(pod)
        for metric in (self._metrics.parity_mismatches, self._metrics.parity_never_hit):
            metric.remove_by_labels({"pod": pod})

    def report(self) -> Sequence[WatchedPod]:
        with self._lock:
            return list(self._pods.values())

    def check(self, now_s: float) -> None:
        """Shows which pods never store what is computed for them; to be called every few seconds."""
        for account in self.report():
            self._metrics.parity_never_hit.labels(account.pod).set(account.never_hit)
            if account.never_hit:
                self._warn(account, now_s)

    def details(self) -> list[str]:
        """One line for each pod that is distrusted, at most 20."""
        distrusted = [account for account in self.report() if account.mismatched]
        return [str(account.last_mismatch or account) for account in distrusted[:_LINES_MAX]]

    def _warn(self, sign: Mismatch | WatchedPod, now_s: float) -> None:
        if now_s - self._warned_s.get(type(sign), -math.inf) >= self._warn_every_s:
            self._warned_s[type(sign)] = now_s
            _log.warning("%s", sign)

    def _meets(self, account: WatchedPod, stored: set[int]) -> bool:
        """Whether a run brought what was expected; nothing is expected any more of those that it met."""
        met = [each for each, it in account.waiting.items() if not stored.isdisjoint(it.keys)]
        for request_id in met:
            self._forget(request_id)
            account.misses_in_a_row, account.never_hit = 0, False
            account.matches_needed = max(0, account.matches_needed - 1)
        return bool(met)

    def _forget_pod(self, pod: str) -> None:
        account = self._pods.get(pod)
        if account is not None:
            for request_id in tuple(account.waiting):
                self._forget(request_id)
            del self._pods[pod]

    def _forget(self, request_id: Hashable) -> _Expectation | None:
        expectation = self._expected.pop(request_id, None)
        if expectation is not None:
            del expectation.account.waiting[request_id]
        return expectation

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
            expectation.account.pod,
            expectation.model,
            expectation.start_tokens + position,
            self._digest(expectation.tokens[window]),
            self._digest(expectation.instead[window]),
        )

    def _digest(self, tokens: NDArray[np.uint32]) -> str:
        return blake2b(tokens.tobytes(), digest_size=_DIGEST_BYTES, key=self._secret).hexdigest()
