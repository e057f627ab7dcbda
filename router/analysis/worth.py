"""Worth of the routing: prompt tokens computed, compared with those under other policies.

Tokens by model are those of all requests, as the pods reported them, else as predicted. Tokens by policy are
those of the sampled sessions in the caches of `Shadow`, scaled to all sessions: kvroute's own picks too, so
that what these caches leave out (host tiers, deadlines) is left out of every policy alike. No I/O, no clock.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

from indexer import DispatchKey
from router.analysis.shadow import LEAST_REQUESTS, OURS, POLICIES, ROUND_ROBIN, Placed, Shadow
from router.observe.metrics import RouterMetrics

COMPUTED, DEVICE, HOST = "computed", "device", "host"
_IN_FLIGHT_MAX = 10_000
_IN_FLIGHT_BLOCKS_MAX = 1 << 20
_TENANTS_MAX = 1000
_OTHER = "other"
_DAY_S, _HOUR_S = 86_400.0, 3600.0
# Smaller savings of prefill are called none.
_NOTABLE = 0.01
# Difference between the caches here and what pods reported above which it is said.
_DOUBTFUL = 0.1
_NAMES = {ROUND_ROBIN: "round-robin", LEAST_REQUESTS: "least-requests"}


class Flight(NamedTuple):
    """Request in flight."""

    model: str
    tenant: str | None
    prompt_tokens: int
    cached_tokens: int  # predicted at the picked pod, in any tier
    host_tokens: int  # those of them in the host tier
    placed: Placed
    tokens_per_s: Mapping[str, float]  # prefill rate by pod


class Worth:
    """Sums over all requests. Not thread-safe, but for `page`.

    Args:
        metrics: Holds the sums by model and by policy.
        gpu_hour_price: Of the GPUs of one pod; None if the operator gave none.
    """

    def __init__(
        self, metrics: RouterMetrics, shadow: Shadow, gpu_hour_price: float | None, started_s: float
    ) -> None:
        self._metrics, self._shadow, self._price, self._started_s = metrics, shadow, gpu_hour_price, started_s
        self._in_flight: OrderedDict[DispatchKey, Flight] = OrderedDict()
        self._blocks = 0
        self._tenants: defaultdict[str, Counter[str]] = defaultdict(Counter)
        # Computed tokens of sampled requests whose pod reported its cached tokens: simulated, and true.
        self._checked, self._true = 0, 0

    def begin(self, key: DispatchKey, flight: Flight) -> None:
        """Record a pick."""
        for policy, tokens in flight.placed.computed.items():
            computed, rate = tokens / flight.placed.sample, flight.tokens_per_s[flight.placed.pods[policy]]
            seconds = computed / rate if rate > 0.0 else 0.0
            self._metrics.count("policy_computed_tokens", policy, number=computed)
            self._metrics.count("policy_prefill_seconds", policy, number=seconds)
        self._in_flight[key] = flight
        self._blocks += len(flight.placed.keys)
        while len(self._in_flight) > _IN_FLIGHT_MAX or self._blocks > _IN_FLIGHT_BLOCKS_MAX:
            self.end(next(iter(self._in_flight)), None, None)

    def end(self, key: DispatchKey, cached_tokens: int | None, output_tokens: int | None) -> None:
        """Record the end of a request; the tokens are None if they were not reported."""
        flight = self._in_flight.pop(key, None)
        if flight is None:
            return
        self._blocks -= len(flight.placed.keys)
        self._shadow.end(flight.placed, output_tokens or 0)
        cached = min(flight.cached_tokens if cached_tokens is None else cached_tokens, flight.prompt_tokens)
        host = min(flight.host_tokens, cached)
        tokens = {COMPUTED: flight.prompt_tokens - cached, DEVICE: cached - host, HOST: host}
        if cached_tokens is not None and flight.placed.computed:
            self._checked += flight.placed.computed[OURS]
            self._true += tokens[COMPUTED]
        if (tenant := flight.tenant) is not None:
            known = tenant in self._tenants or len(self._tenants) < _TENANTS_MAX
            self._tenants[tenant if known else _OTHER].update(tokens)
        for source, number in tokens.items():
            self._metrics.count("served_prompt_tokens", flight.model, source, number=number)

    def page(self, now_s: float) -> dict[str, Any]:
        """Return the sums, and what would be lost a day without kvroute."""
        days = max(now_s - self._started_s, 1.0) / _DAY_S
        tokens, seconds = self._sums("policy_computed_tokens"), self._sums("policy_prefill_seconds")
        models = defaultdict[str, Any](dict)
        for (model, source), number in self._metrics.values("served_prompt_tokens").items():
            models[model][source] = int(number)
        saved = {}
        for policy in _NAMES:
            saved_s = (seconds[policy] - seconds[OURS]) / days
            hours = saved_s / _HOUR_S
            money = None if self._price is None else hours * self._price
            saved[policy] = {"prefill_s": saved_s, "gpu_hours": hours, "money": money}
        return {
            "days": days,
            "sample": self._shadow.sample,
            "price_per_gpu_hour": self._price,
            "policies": {
                policy: {"computed_tokens": round(tokens[policy]), "prefill_s": seconds[policy]}
                for policy in POLICIES
            },
            "models": models,
            "tenants": {tenant: dict(each) for tenant, each in self._tenants.copy().items()},
            "saved_per_day": saved,
            "verdict": self._verdict(seconds),
        }

    def _sums(self, name: str) -> dict[str, float]:
        values = self._metrics.values(name)
        return {policy: values.get((policy,), 0.0) for policy in POLICIES}

    def _verdict(self, seconds: Mapping[str, float]) -> str:
        if not seconds[OURS]:
            return "Nothing is known yet: no request was seen whose pods tell the size of their cache."
        more = [(name, seconds[policy] / seconds[OURS] - 1.0) for policy, name in _NAMES.items()]
        clauses = [
            f"Behind {name} the pods would spend {share:.0%} more on prefill."
            if share >= _NOTABLE
            else f"Against {name} you would lose nothing without kvroute."
            for name, share in more
        ]
        if self._true and abs(error := self._checked / self._true - 1.0) > _DOUBTFUL:
            clauses.append(
                f"Doubtful: the estimate of kvroute's own tokens is {error:+.0%} off the reported ones."
            )
        return " ".join(clauses)
