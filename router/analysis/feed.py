"""Thread that analyses picks behind their way: a bounded queue in, metrics, decision records and pages out.

Work is dropped, and counted, when the queue is full: while picks come faster than `_SHARE` of a core can
analyse. The thread keeps to that share by sleeping, not by a lower priority of the operating system, under
which it would be stopped with the interpreter's lock in hand while picks wait for it.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from common.repeated_log import RepeatedLog
from indexer.keys import Keys
from router.analysis.breaks import PrefixBreaks, Prompt
from router.analysis.funnel import funnel
from router.analysis.hot_prefixes import HotPrefixes
from router.analysis.parts import read_parts
from router.analysis.shadow import Blocks, Shadow
from router.analysis.worth import Flight, Worth
from router.observe.decision_log import DecisionLog
from router.observe.requests import PickQueue
from router.picking.decision import Decision
from router.picking.scheduler import TokenizedRequest
from router.pods.pod_set import PodSet

if TYPE_CHECKING:
    from indexer import KvIndexer

_log = logging.getLogger(__name__)
_POLL_S = 0.1
_SHARE = 0.1  # of a core
_TENANT_CHARS = 12


class Analysis:
    """Analyses of the picks in `queue`, and of the ends in the decision log.

    Args:
        names_tenants: Whether cache salts stand for tenants (`--salt-from`).
    """

    def __init__(
        self,
        pods: PodSet,
        index: KvIndexer,
        decisions: DecisionLog,
        gpu_hour_price: float | None = None,
        *,
        names_tenants: bool = False,
    ) -> None:
        self._pods, self._index, self._decisions = pods, index, decisions
        self._names_tenants = names_tenants
        self._metrics = metrics = decisions.metrics
        self._key = secrets.token_bytes(32)
        self._breaks = PrefixBreaks(index.block_tokens, self._key)
        self._prefixes = HotPrefixes(index.block_tokens, self._key)
        self._shadow = Shadow(index.block_tokens)
        self._worth = Worth(metrics, self._shadow, gpu_hour_price, time.monotonic())
        self.queue = PickQueue(lambda reason: metrics.count("analysis_dropped", reason))
        decisions.on_end = self.queue.ended
        self._rates: dict[str, float] = {}  # of the pods in use since the last look at the queue
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="analysis", daemon=True)
        self._repeated = RepeatedLog(_log)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def pages(self) -> dict[str, Callable[[Mapping[str, str]], tuple[int, Any]]]:
        return {
            "/debug/funnel": lambda _query: (200, funnel(self._metrics)),
            "/debug/prefix_breaks": lambda _query: (200, self._breaks.page()),
            "/debug/prefixes": lambda _query: (200, self._prefixes.page(self._holders)),
            "/debug/worth": lambda _query: (200, self._worth.page(time.monotonic())),
        }

    def _run(self) -> None:
        while not self._stopping.wait(_POLL_S):
            loads = {address: pod.load for address, pod in self._pods.current.items()}
            sizes = {pod: load.kv_capacity_tokens for pod, load in loads.items() if load is not None}
            self._shadow.resize({pod: size for pod, size in sizes.items() if size})
            self._rates.clear()
            while (item := self.queue.take()) is not None and not self._stopping.is_set():
                began_s = time.thread_time()
                try:
                    if len(item) == 3:
                        self._worth.end(*item)
                    else:
                        self._analyse(*item)
                except Exception as error:
                    # Hostile bodies end here, and the thread must survive.
                    self._metrics.count("analysis_dropped", "failed")
                    self._repeated.event("analysis_failed", "requests", "analysis failed", error=error)
                time.sleep((time.thread_time() - began_s) * (1.0 / _SHARE - 1.0))

    def _analyse(self, tokenized: TokenizedRequest, decision: Decision) -> None:
        request, best, match = tokenized.request, decision.primary, decision.ranked.matches[0]
        keys, pods = tokenized.keys[0], decision.ranked.pods
        model = self._metrics.model_label(decision.model or "")
        head = request.request_id, time.time(), model, hash((request.model, request.cache_salt))
        parts, ids = read_parts(request), tokenized.tokens.prompts[0]
        session, is_new, found = self._breaks.observe(
            Prompt(*head, parts, ids, best.cached_tokens, self._rate(best.pod))
        )
        if found is not None:
            self._metrics.count("prefix_breaks", model, found.part)
            self._metrics.count("prefix_break_lost_tokens", model, found.part, number=found.lost_tokens)
            self._decisions.prefix_broke(found.request_id, msgspec.structs.asdict(found))
        held = max(match.longest, *match.behind[:2])
        if is_new:
            self._prefixes.began(keys, held)
        tokens = decision.prompt_tokens
        prompt = Blocks(session, keys, tokens, held, int(match.strides.max(initial=1)))
        placed = self._shadow.begin(model, pods, best.pod, prompt)
        rates = {pod: self._rate(pod) for pod in placed.pods.values()}
        tenant = (request.cache_salt or "")[:_TENANT_CHARS] if self._names_tenants else None
        flight = Flight(model, tenant, tokens, best.cached_tokens, best.host_tokens, placed, rates)
        self._worth.begin(decision.key, flight)

    def _rate(self, pod: str) -> float:
        if pod not in self._rates:
            self._rates[pod] = self._pods.load_table.prefill_tokens_per_s(pod)
        return self._rates[pod]

    def _holders(self, keys: Keys) -> list[str]:
        match = self._index.match(keys, frozenset(self._pods.current))
        return [pod for pod, row in match.rows.items() if match.held[row] >= len(keys)]
