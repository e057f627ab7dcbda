"""What the debug pages show: the live state in, JSON-ready values out; of HTTP only a status and a query."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from indexer import StreamState
from router.debug_http import Page, Query
from router.explain import Explain
from router.health import Health
from router.ledger import Ledger
from router.pods import Pod, PodSet
from router.pods_source import PodsSource
from router.rates import PrefillRates

if TYPE_CHECKING:
    from indexer import KvIndexer

_DECISIONS_DEFAULT = 20


@dataclass(frozen=True, slots=True)
class DebugPages:
    """The pages by path.

    Attributes:
        plugins: Returns what configured plugins remember, by name.
        routers: Returns the others of the fleet, by the time.
    """

    source: PodsSource
    pods: PodSet
    index: KvIndexer
    ledger: Ledger
    rates: PrefillRates
    explain: Explain
    health: Health
    plugins: Callable[[], Mapping[str, Any]]
    routers: Callable[[float], Sequence[Mapping[str, Any]]]

    def pages(self) -> dict[str, Page]:
        return {
            "/healthz": self._alive,
            "/ready": self._is_ready,
            "/debug/decisions": self._decisions,
            "/debug/pods": self._pod_list,
            "/debug/discovery": self._discovery,
            "/debug/plugins/state": self._plugin_states,
        }

    def _alive(self, _query: Query) -> tuple[int, Any]:
        return 200, {"status": "alive"}

    def _is_ready(self, _query: Query) -> tuple[int, Any]:
        index = {
            "views_pending": sorted(self.index.pending()),
            "parity": self.index.parity_details(),
            "routers": list(self.routers(time.monotonic())),
            "pods_asleep": [pod.address for pod in self.pods.snapshot().values() if pod.asleep],
        }
        if self.health.ready:
            return 200, {"status": "ready", **index}
        waiting = [pod.address for pod in self.pods.snapshot().values() if not pod.probed]
        missing = {"waits_for": list(self.source.waits_for()), "pods_not_probed_yet": waiting}
        return 503, {"status": "not ready", **missing, **index}

    def _decisions(self, query: Query) -> tuple[int, Any]:
        if "request_id" in query:
            record = self.explain.one(query["request_id"])
            return 200, {"decisions": [record] if record is not None else []}
        count = query.get("n", str(_DECISIONS_DEFAULT))
        if not count.isdecimal() or len(count) > 9:
            return 400, {"error": f"n must be a whole number, not {count!r}"}
        return 200, {"decisions": self.explain.latest(int(count))}

    def _pod_list(self, _query: Query) -> tuple[int, Any]:
        views = self.index.states()
        return 200, {
            "pods": [self._pod(pod, views) for pod in self.pods.snapshot().values()],
            "parity": self.index.parity_details(),
        }

    def _discovery(self, _query: Query) -> tuple[int, Any]:
        return 200, self.source.shown(time.monotonic())

    def _plugin_states(self, _query: Query) -> tuple[int, Any]:
        return 200, {"plugins": self.plugins()}

    def _pod(self, pod: Pod, views: Mapping[str, StreamState]) -> dict[str, Any]:
        models = pod.models
        return {
            "address": pod.address,
            "name": pod.name,
            "ready": pod.ready,
            "why_not": pod.why,
            "asleep": pod.asleep,
            "declared_ready": pod.entry.ready,
            "labels": dict(pod.entry.labels),
            "view": views[pod.address].value if pod.address in views else None,
            "base_model": models.base if models else None,
            "aliases": sorted(models.aliases) if models else [],
            "adapters": sorted(models.adapters) if models else [],
            "max_model_len": models.max_model_len if models else None,
            "scraped": asdict(pod.load) if pod.load else None,
            "in_flight": asdict(self.ledger.work(pod.address)),
            "prefill_tokens_per_s": self.rates.tokens_per_s(pod.address),
        }
