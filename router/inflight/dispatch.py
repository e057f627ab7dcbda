"""One sending of a request to a pod, and what the ledger keeps and tells of it. No I/O and no clock."""

from __future__ import annotations

from collections import Counter, defaultdict
from threading import Lock

import msgspec

from indexer import DispatchKey
from router.inflight.rates import Lesson


class Dispatch(msgspec.Struct, frozen=True):
    """One request sent to one pod."""

    request_id: str
    pod: str
    uncached_tokens: int  # prompt tokens the pod has to compute
    queued_prefill_s: float
    own_prefill_s: float
    # Key of the last block it will compute: when the pod announces it, the prefill is over. None where no
    # such announcement is to be expected.
    confirm_key: int | None
    lesson: Lesson  # what the time to its first token tells of the pod's prefill rate
    dispatched_s: float
    decoding: int = 0  # requests that decoded on the pod that prefills it, others' among them
    prefill_pod: str | None = None  # where it is prefilled, if `pod` only decodes; the numbers are its then
    adapter: str | None = None  # the LoRA adapter that it needs
    promised_tokens: int = 0  # prompt tokens that `pod` should find in its cache; 0: not known well

    @property
    def computed_on(self) -> str:
        """The pod that prefills it."""
        return self.prefill_pod or self.pod

    @property
    def key(self) -> DispatchKey:
        """What tells it apart from others of its id."""
        return DispatchKey(self.request_id, self.dispatched_s)


class Entry(msgspec.Struct, eq=False):
    """An entry of the ledger: a request in flight, where, and since when."""

    dispatch: Dispatch
    number: int  # its ticket on the board; no other entry ever has it
    pod: str
    arrived_s: float
    confirm_key: int | None  # of the dispatch, until it is announced
    promised_tokens: int  # of the dispatch, until they are due, or it is over
    is_waiting: bool = True  # whether it is believed to await its first token
    prefill_ended_s: float | None = None  # when somebody told so; the clock does not count


class SentAdapters:
    """Adapters that the requests in flight need, by pod. Thread-safe.

    An engine tells its adapters as of the last scrape; what was sent there since is known here.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        # Requests by pod and adapter, the adapter that came first first.
        self._requests: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def on(self, pod: str) -> tuple[str, ...]:
        """Adapters that the pod's requests need, the one that came first first."""
        with self._lock:
            return tuple(self._requests.get(pod, ()))

    def began(self, pod: str, adapter: str | None) -> None:
        if adapter is not None:
            with self._lock:
                self._requests[pod][adapter] += 1

    def ended(self, pod: str, adapter: str | None) -> None:
        if adapter is not None:
            with self._lock:
                requests = self._requests[pod]
                requests[adapter] -= 1
                if not requests[adapter]:
                    del requests[adapter]
                if not requests:
                    del self._requests[pod]
