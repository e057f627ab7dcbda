"""Seconds that bringing a LoRA adapter in costs on a pod: its account of its places in, seconds out.

The order of the four cases is the reference picker's (running, room, waiting, none); it gives them scores.
"""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock

from router.scrape import LoraLoad

# To bring an adapter's weights to the device (100 MB from the host's memory or disk).
_LOAD_S = 0.2
# Until one of the adapters that run has no requests any more and makes room.
_PLACE_S = 2.0


def adapter_s(load: LoraLoad | None, adapter: str, sent: Iterable[str] = ()) -> float:
    """Seconds until the pod can compute with this adapter.

    Args:
        load: None for a pod that does not tell: nothing is known, so nothing is charged.
        sent: Adapters that our requests there need, the one that came first first; `load` may be older.
    """
    if load is None:
        return 0.0
    load = _with_sent(load, sent)
    if adapter in load.running:
        return 0.0
    if len(load.running | load.waiting) < load.places:
        return _LOAD_S
    if adapter in load.waiting:
        # It waits for a place already, on average for half of the time.
        return _PLACE_S / 2 + _LOAD_S
    return _PLACE_S + _LOAD_S


def _with_sent(load: LoraLoad, sent: Iterable[str]) -> LoraLoad:
    """The account as it is once the engine has seen these: each takes a place, or waits for one."""
    running, waiting = load.running, load.waiting
    for adapter in sent:
        if adapter in running or adapter in waiting:
            continue
        if len(running | waiting) < load.places:
            running |= {adapter}
        else:
            waiting |= {adapter}
    return LoraLoad(running, waiting, load.places)


class SentAdapters:
    """Which adapters the requests in flight need, by pod. Thread-safe.

    An engine tells its adapters as of the last scrape; what was sent there since is known here.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        # Requests by adapter, the adapter that came first first; what is in here is replaced, never changed.
        self._requests: dict[str, dict[str, int]] = {}

    def on(self, pod: str) -> tuple[str, ...]:
        """Those that the pod's requests need, the one that came first first."""
        return tuple(self._requests.get(pod, ()))

    def began(self, pod: str, adapter: str | None) -> None:
        if adapter is None:
            return
        with self._lock:
            requests = self._requests.get(pod, {})
            self._requests[pod] = {**requests, adapter: requests.get(adapter, 0) + 1}

    def ended(self, pod: str, adapter: str | None) -> None:
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
