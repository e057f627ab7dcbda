"""Which LoRA adapters the requests in flight need, by pod: their beginnings and ends in, the adapters out.

An engine tells its adapters as of the last scrape; what was sent there since is known here. No I/O and no
clock; knows no places and no seconds.
"""

from __future__ import annotations

from threading import Lock


class SentAdapters:
    """Adapters by pod. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        # Requests by adapter, the adapter that came first first; what is in here is replaced, never changed.
        self._requests: dict[str, dict[str, int]] = {}

    def on(self, pod: str) -> tuple[str, ...]:
        """Those that the pod's requests need, the one that came first first."""
        return tuple(self._requests.get(pod, ()))

    def began(self, pod: str, adapter: str | None) -> None:
        """A request was sent to the pod; None: it needs no adapter."""
        if adapter is None:
            return
        with self._lock:
            requests = self._requests.get(pod, {})
            self._requests[pod] = {**requests, adapter: requests.get(adapter, 0) + 1}

    def ended(self, pod: str, adapter: str | None) -> None:
        """One that began there is over, or goes on elsewhere."""
        if adapter is None:
            return
        with self._lock:
            requests = dict(self._requests[pod])
            requests[adapter] -= 1
            if not requests[adapter]:
                del requests[adapter]
            if requests:
                self._requests[pod] = requests
            else:
                del self._requests[pod]
