"""What the routing is worth: prompt tokens computed, against what other policies would have had computed.

Tokens by model are those of all requests, as the pods reported them, else as predicted. Tokens by policy are
those of the sampled sessions in the caches of `Shadow`, scaled to all sessions: kvroute's own picks too, so
that what these caches leave out (host tiers, deadlines) is left out of every policy alike. No I/O, no clock.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from indexer import DispatchKey
from router.analysis.shadow import LEAST_REQUESTS, OURS, POLICIES, ROUND_ROBIN, Placed, Shadow

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
        gpu_hour_price: Of the GPUs of one pod; None if the operator gave none.
        count: Called with a counter's name, labels and `number`.
    """

    def __init__(
        self, shadow: Shadow, gpu_hour_price: float | None, started_s: float, count: Callable[..., None]
    ) -> None:
        self._shadow, self._price, self._started_s, self._count = shadow, gpu_hour_price, started_s, count
        self._in_flight: OrderedDict[DispatchKey, Flight] = OrderedDict()
        self._blocks = 0
        self._models: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._tenants: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._tokens, self._prefill_s = dict.fromkeys(POLICIES, 0.0), dict.fromkeys(POLICIES, 0.0)
        # Of sampled requests whose pod reported its cached tokens: computed in our caches, and in truth.
        self._checked, self._true = 0, 0

    def begin(self, key: DispatchKey, flight: Flight) -> None:
        """Record a pick."""
        for policy, tokens in flight.placed.computed.items():
            computed, rate = tokens / flight.placed.sample, flight.tokens_per_s[flight.placed.pods[policy]]
            seconds = computed / rate if rate > 0.0 else 0.0
            self._tokens[policy] += computed
            self._prefill_s[policy] += seconds
            self._count("policy_tokens", policy, number=computed)
            self._count("policy_s", policy, number=seconds)
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
        self._models[flight.model].update(tokens)
        if (tenant := flight.tenant) is not None:
            known = tenant in self._tenants or len(self._tenants) < _TENANTS_MAX
            self._tenants[tenant if known else _OTHER].update(tokens)
        for source, number in tokens.items():
            self._count("served", flight.model, source, number=number)

    def page(self, now_s: float) -> dict[str, Any]:
        """Return the sums, and what would be lost a day without kvroute."""
        days = max(now_s - self._started_s, 1.0) / _DAY_S
        saved = {}
        for policy in _NAMES:
            seconds = (self._prefill_s[policy] - self._prefill_s[OURS]) / days
            hours = seconds / _HOUR_S
            money = None if self._price is None else hours * self._price
            saved[policy] = {"prefill_s": seconds, "gpu_hours": hours, "money": money}
        return {
            "days": days,
            "sample": self._shadow.sample,
            "price_per_gpu_hour": self._price,
            "policies": {
                policy: {"computed_tokens": round(self._tokens[policy]), "prefill_s": self._prefill_s[policy]}
                for policy in POLICIES
            },
            "models": {model: dict(tokens) for model, tokens in self._models.copy().items()},
            "tenants": {tenant: dict(tokens) for tenant, tokens in self._tenants.copy().items()},
            "saved_per_day": saved,
            "verdict": self._verdict(),
        }

    def _verdict(self) -> str:
        ours = self._prefill_s[OURS]
        if not ours:
            return "Nothing is known yet: no request was seen whose pods tell the size of their cache."
        more = {name: self._prefill_s[policy] / ours - 1.0 for policy, name in _NAMES.items()}
        clauses = [
            f"behind {name} the pods would spend {share:.0%} more on prefill"
            if share >= _NOTABLE
            else f"against {name} you would lose nothing without kvroute"
            for name, share in more.items()
        ]
        text = "; ".join(clauses)
        text = f"{text[0].upper()}{text[1:]}."
        if self._true and abs(error := self._checked / self._true - 1.0) > _DOUBTFUL:
            text += f" Doubtful: for kvroute's own picks the estimate is {error:+.0%} off what pods reported."
        return text
