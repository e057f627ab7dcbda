"""Dispatched requests, their ledger entries, and the LoRA adapters they need. No I/O and no clock."""

from __future__ import annotations

from collections import Counter, defaultdict
from threading import Lock

import msgspec

from indexer import DispatchKey
from router.inflight.rates import RateSample

SEQUENCES_MAX = 1024  # most sequences of one request that are counted; clients choose the number


class Dispatch(msgspec.Struct, frozen=True):
    """A request sent to a pod."""

    request_id: str
    pod: str
    uncached_tokens: int  # prompt tokens the pod has to compute
    queued_prefill_s: float
    own_prefill_s: float
    # Key of the last block the pod will store: the prefill has ended when the pod publishes it. None if no
    # such event is expected.
    confirm_key: int | None
    rate_sample: RateSample  # how the time to first token counts in the pod's prefill rate
    dispatched_s: float
    decoding: int = 0  # requests decoding on the prefilling pod, including those of other routers
    prefill_pod: str | None = None  # pod that prefills if `pod` only decodes; the figures above are for it
    adapter: str | None = None  # LoRA adapter the request needs
    engine: str | None = None  # engine of a pod with several, chosen by the router; None: the pod chooses
    sequences: int = 1  # sequences that the pod decodes after the first token
    predicted_hit_tokens: int = 0  # prompt tokens expected in the cache of `pod`; 0 if the view is not exact

    @property
    def computed_on(self) -> str:
        """Pod that prefills the request."""
        return self.prefill_pod or self.pod

    @property
    def key(self) -> DispatchKey:
        """Key that distinguishes this dispatch from others with the same request id."""
        return DispatchKey(self.request_id, self.dispatched_s)


class Entry(msgspec.Struct, eq=False):
    """Ledger entry of a request in flight."""

    dispatch: Dispatch
    number: int  # load-table number, unique over all entries
    pod: str
    arrived_s: float
    confirm_key: int | None  # copied from the dispatch; None once the pod has published the block
    predicted_hit_tokens: int  # copied from the dispatch; 0 once counted as answered, or ended
    is_waiting: bool = True  # False once the first token is reported or presumed
    prefill_ended_s: float | None = None  # time of the first report; timeouts do not set it


class SentAdapters:
    """LoRA adapters needed by the requests in flight, per pod. Thread-safe.

    Engines report their adapters at each scrape; this class adds those of requests sent since then.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        # Requests by pod and adapter, oldest adapter first.
        self._requests: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def on(self, pod: str) -> tuple[str, ...]:
        """Return the adapters that the pod's requests need, oldest first."""
        with self._lock:
            return tuple(self._requests.get(pod, ()))

    def count(self, pod: str, adapter: str | None, change: int) -> None:
        """Add a request (1) that needs an adapter, or remove it (-1)."""
        if adapter is not None:
            with self._lock:
                requests = self._requests[pod]
                requests[adapter] += change
                if not requests[adapter]:
                    del requests[adapter]
                if not requests:
                    del self._requests[pod]
