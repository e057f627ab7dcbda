"""Request lifecycle after the pick: applies reports of first tokens and ends to ledger, rates and metrics.

The first report of an event counts, even after a timeout; the delay of later reports goes to the metrics.
Knows no protocol. `Lifecycle` is thread-safe and holds no lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from indexer import DispatchKey
from indexer.keys import Keys
from router.feedback.outcomes import (
    ACCESS_LOG,
    BLOCKS,
    CLOCK,
    DISPLACED,
    DONE,
    FAILED,
    FIRST_TOKEN,
    POD_FAILED,
    POD_SERVED,
    REFUSED,
    REPORT,
    RESPONSE,
    SCRAPE,
    STATE,
    DuplicateEnds,
    PodOutcomes,
    RequestReport,
)
from router.inflight.dispatch import Dispatch
from router.inflight.failures import PodFailures
from router.inflight.ledger import Ledger
from router.inflight.rates import PrefillRates
from router.observe.decision_log import DecisionLog
from router.picking.candidates import StatePods
from router.picking.decision import Decision
from router.pods.engine_load import EngineLoad
from router.pods.pod_set import PodSnapshot

# States that a new peer receives; more follow with their next use.
_STATES_SHARED = 10_000


@dataclass(slots=True)
class Lifecycle:
    """Lifecycle of dispatched requests; every report on a request goes through it."""

    ledger: Ledger
    rates: PrefillRates
    decision_log: DecisionLog  # also counts the events
    settle: Callable[[DispatchKey, float], None]  # ends a request's speculative index entries at a time
    drop: Callable[[DispatchKey], None]  # stops waiting for a request's blocks; called before `settle`
    failures: PodFailures
    states: StatePods | None = None  # learns which pod keeps which state
    outcomes: PodOutcomes = field(init=False)
    # Whether another router has a request of this id in flight.
    is_remote: Callable[[str], bool] = field(init=False, default=lambda _request_id: False)
    _forward: Callable[[RequestReport], None] = field(init=False, default=lambda _report: None)
    _duplicates: DuplicateEnds = field(init=False, default_factory=DuplicateEnds)

    def __post_init__(self) -> None:
        metrics = self.decision_log.metrics
        self.outcomes = PodOutcomes(self.failures, partial(metrics.count, "served_requests"))
        self.failures.share = self._share

    def forward_to(self, forward: Callable[[RequestReport], None], is_remote: Callable[[str], bool]) -> None:
        """Forward reports on unknown requests to other routers from now on."""
        self._forward, self.is_remote = forward, is_remote

    def decided(self, decision: Decision, displaced: Sequence[Dispatch], arrived_s: float) -> None:
        """Record a pick for a request that arrived at `arrived_s`; the ledger evicted `displaced` for it."""
        self.decision_log.decided(decision)
        for dispatch in displaced:
            self._end_unreported(dispatch, DISPLACED, decision.decided_s)
        if decision.is_charged and self.ledger.ended_while_unknown(decision.request_id, arrived_s):
            # The client disconnected before the pick, and Envoy reports that only once.
            report = RequestReport(decision.request_id, FAILED, ACCESS_LOG, decision.primary.pod)
            self.ended(report, decision.decided_s)

    def stored(self, pod: str, keys: Keys, now_s: float) -> None:
        """Record blocks that a pod has stored; a prompt's last block ends the prefill."""
        prefills, late_s = self.ledger.stored(pod, keys, now_s)
        for dispatch in prefills:
            self._prefill_ended(dispatch, BLOCKS, now_s)
        for seconds in late_s:
            self.decision_log.reported_late(FIRST_TOKEN, BLOCKS, seconds)

    def first_token(
        self,
        request_id: str,
        source: str,
        now_s: float,
        *,
        pod: str | None = None,
        dispatched_s: float | None = None,
        forward: bool = True,
    ) -> bool:
        """Record a request's first token; return whether the request is in flight.

        Args:
            pod: Pod of the request, if known; selects among requests in flight under one id.
            dispatched_s: Dispatch time (`Decision.decided_s`), if known; selects among those on one pod.
            forward: Whether to forward the report to other routers if the request is unknown.
        """
        dispatch = self.ledger.first_token(request_id, now_s, pod, dispatched_s)
        if dispatch is not None:
            self._prefill_ended(dispatch, source, now_s)
        elif (known_s := self.ledger.prefill_ended_s(request_id, pod, dispatched_s)) is not None:
            self.decision_log.reported_late(FIRST_TOKEN, source, now_s - known_s)
        elif forward and request_id not in self.ledger:
            self._forward(RequestReport(request_id, FIRST_TOKEN, source, pod))
        return request_id in self.ledger

    def ended(
        self, report: RequestReport, now_s: float, *, dispatched_s: float | None = None, forward: bool = True
    ) -> Dispatch | None:
        """Record the end of a request, see `first_token`; return its dispatch if it was in flight."""
        request_id, source, pod = report.request_id, report.source, report.pod
        dispatch, is_answered = None, report.event == DONE
        known = self._duplicates.consume(request_id, now_s, pod) if source == ACCESS_LOG else None
        if known is not None:
            self.outcomes.repeated(*known, report, now_s)
        else:
            late_s = max(0.0, report.late_s or 0.0)
            dispatch = self.ledger.end(
                request_id, now_s, pod, dispatched_s, late_s=late_s, answered=is_answered
            )
        if dispatch is not None:
            self.outcomes.ended(dispatch, report, now_s)
            if source == RESPONSE:
                self._duplicates.expect(request_id, now_s, dispatch, report.is_fault)
            if is_answered:
                self.settle(dispatch.key, now_s)
            else:
                self._settle_unanswered(dispatch, now_s)
        elif (known_s := self.ledger.ended_s(request_id)) is not None:
            self.decision_log.reported_late("end", source, now_s - known_s)
        elif forward:
            self._forward(report)
        if dispatch is not None or report.cached_tokens is not None:
            self.decision_log.ended(
                request_id,
                source,
                now_s,
                failed=report.event == FAILED,
                late_s=report.late_s or 0.0,
                cached_tokens=report.cached_tokens,
                output_tokens=report.output_tokens if report.event == DONE else None,
                dispatch=dispatch,
                pod=pod,
            )
        return dispatch

    def keeps_state(self, state_id: str, pod: str) -> None:
        """Record here and at other routers that a pod keeps state which later requests name by this id."""
        if self.states is not None:
            self.states.learn(state_id, pod)
        self._forward(RequestReport(state_id, STATE, RESPONSE, pod))

    def state_reports(self) -> list[RequestReport]:
        """Return reports of the latest states, oldest first, for a router that begins to follow this one."""
        known = self.states.latest(_STATES_SHARED) if self.states is not None else []
        return [RequestReport(state_id, STATE, RESPONSE, pod) for state_id, pod in reversed(known)]

    def expire(self, now_s: float) -> None:
        """Apply the timeouts of prefills, the lifetime of requests and the times of failing pods."""
        self.failures.expire(now_s)
        prefills, expired = self.ledger.expire(now_s)
        for dispatch in prefills:
            # The speculative entries stay: the prefill may still be running.
            self.decision_log.prefill_ended(dispatch, CLOCK, now_s)
        for dispatch in expired:
            self._end_unreported(dispatch, CLOCK, now_s)

    def end_lost(self, pod: str, engine_requests: int, scraped_s: float, now_s: float) -> None:
        """End the pod's requests in excess of its engine's count, see `Ledger.end_lost`."""
        for dispatch in self.ledger.end_lost(pod, engine_requests, scraped_s, now_s):
            self._end_unreported(dispatch, SCRAPE, now_s)

    def engine_idle(self, pod: str, asked_s: float, now_s: float) -> None:
        """End the waiting of requests at an engine without requests, see `Ledger.engine_idle`."""
        for dispatch in self.ledger.engine_idle(pod, asked_s, now_s):
            self.decision_log.prefill_ended(dispatch, SCRAPE, now_s)

    def is_known(self, request_id: str) -> bool:
        """Return whether a request of this id is in flight here or elsewhere, or has ended here lately."""
        if request_id in self.ledger or self.ledger.ended_s(request_id) is not None:
            return True
        return self.is_remote(request_id)

    def peer_reported(self, report: RequestReport, now_s: float) -> None:
        """Apply a report that another router received and forwarded."""
        request_id, source, pod = report.request_id, report.source, report.pod
        if report.event == STATE and pod is not None and self.states is not None:
            self.states.learn(request_id, pod)
        # A gateway that asked two routers for one request has used only one pick: the one of this pod.
        if pod is not None and self.is_remote(request_id) and not self.ledger.is_on(request_id, pod):
            return
        if pod is not None and report.event == POD_FAILED:
            self.failures.failed(pod, now_s, now_s, shared=True)
        if pod is not None and report.event == POD_SERVED:
            self.failures.succeeded(pod, now_s, shared=True)
        if report.event == FIRST_TOKEN:
            self.first_token(request_id, source, now_s, pod=pod, forward=False)
        if report.event in (DONE, FAILED, REFUSED):
            self.ended(report, now_s, forward=False)

    def _share(self, pod: str, failed: bool) -> None:
        self._forward(RequestReport("", POD_FAILED if failed else POD_SERVED, REPORT, pod))

    def _settle_unanswered(self, dispatch: Dispatch, now_s: float) -> None:
        """End the speculative entries of a request that may have stored no blocks."""
        self.drop(dispatch.key)
        self.settle(dispatch.key, now_s)

    def _end_unreported(self, dispatch: Dispatch, source: str, now_s: float) -> None:
        self._settle_unanswered(dispatch, now_s)
        self.decision_log.ended(dispatch.request_id, source, now_s, failed=True, dispatch=dispatch)

    def _prefill_ended(self, dispatch: Dispatch, source: str, now_s: float) -> None:
        tokens, took_s = dispatch.uncached_tokens, now_s - dispatch.dispatched_s
        sample = dispatch.rate_sample
        self.rates.observe(dispatch.computed_on, tokens, took_s, now_s, sample, dispatch.decoding)
        self.settle(dispatch.key, now_s)
        self.decision_log.prefill_ended(dispatch, source, now_s)


# Longer than a report of an end takes, which Envoy's access log may delay.
_REPORT_DELAY_S = 1.0
# Longer than the requests of a deleted pod usually run on.
_GONE_S = 60.0


class LostEndDetector:
    """Detector of requests whose end was never reported, by the request counts that engines report.

    A count is compared `_REPORT_DELAY_S` after its scrape: by then all earlier ends have been reported, so
    requests in excess of it have lost their reports. An engine without requests has no queue, which is
    applied at once. Requests of a removed pod end after `_GONE_S`, because its gateway may be gone as well;
    that affects no pick, only the number of requests in flight.
    """

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        # By pod: the load whose count is compared next.
        self._pending: dict[str, EngineLoad] = {}
        self._present: frozenset[str] = frozenset()
        self._gone_s: dict[str, float] = {}

    def check(self, pods: PodSnapshot, now_s: float) -> None:
        """Compare the pods' scraped loads with the ledger; cheap, to be called often."""
        pending = {}
        for address, pod in pods.items():
            load = self._pending.get(address, pod.load)
            if pod.load is not None and pod.load.requests == 0:
                self._lifecycle.engine_idle(address, pod.load.asked_s, now_s)
            if load is None:
                continue
            if now_s - load.scraped_s < _REPORT_DELAY_S:
                pending[address] = load
            elif address in self._pending and load.requests is not None:
                self._lifecycle.end_lost(address, load.requests, load.scraped_s, now_s)
        self._pending = pending
        self._end_requests_of_removed(pods, now_s)

    def _end_requests_of_removed(self, pods: PodSnapshot, now_s: float) -> None:
        gone = (self._present | self._gone_s.keys()) - pods.keys()
        self._gone_s = {address: self._gone_s.get(address, now_s) for address in gone}
        self._present = frozenset(pods)
        for address in [address for address in gone if now_s - self._gone_s[address] >= _GONE_S]:
            self._lifecycle.end_lost(address, 0, now_s, now_s)
            del self._gone_s[address]
