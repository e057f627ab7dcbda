"""Reports on requests, and evidence from their ends: failures of pods, and picks that the gateway ignores.

A report names its source: "blocks" (the pod stored the prompt's last block), "access_log", "response",
"report" (of a gateway), "scrape" (the engine has fewer requests than were sent), "clock" (a timeout), or
"displaced" (evicted from the ledger).
"""

from __future__ import annotations

import logging
import sys
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Annotated

import msgspec
from msgspec import Meta

from common.repeated_log import RepeatedLog
from router.inflight.dispatch import Dispatch
from router.inflight.failures import PodFailures

_log = logging.getLogger(__name__)

BLOCKS, ACCESS_LOG, RESPONSE, REPORT = "blocks", "access_log", "response", "report"
SCRAPE, CLOCK, DISPLACED = "scrape", "clock", "displaced"

FIRST_TOKEN, DONE, FAILED, REFUSED = "first_token", "done", "failed", "refused"
# Events without a request: what the report's pod did with its last one.
POD_FAILED, POD_SERVED = "pod_failed", "pod_served"
STATE = "state"

Text = Annotated[str, Meta(max_length=512)]
# A finite number of seconds.
Seconds = Annotated[float, Meta(ge=0.0, le=sys.float_info.max)]

SAME, RETRIED, OTHER, UNKNOWN, AGAIN = "same", "retried", "other", "unknown", "again"

_COMPARED = 100
_IGNORED_MIN = 10
# Longer than Envoy buffers its access log.
_DUPLICATE_MAX_S = 30.0
_DUPLICATES_PER_ID = 64


class RequestReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """Report on a request; sent as it is to other routers if this one does not have the request."""

    request_id: Text
    # `FIRST_TOKEN`, `DONE`, `FAILED` or `REFUSED` (the pod rejected the request with 4xx and computed
    # nothing). `STATE`: the pod keeps state whose id is `request_id`. Any other event is ignored.
    event: Text
    source: Text  # `ACCESS_LOG`, `RESPONSE` or `REPORT`
    pod: Text | None = None
    late_s: Seconds | None = None  # seconds since the end, if the source reports them
    cached_tokens: Annotated[int, Meta(ge=0)] | None = None
    output_tokens: Annotated[int, Meta(ge=0)] | None = None
    # Whether the pod failed the request: 5xx or a broken connection, not the client's 4xx or disconnect.
    is_fault: bool = False
    attempts: Annotated[int, Meta(ge=0)] = 0  # times that Envoy sent the request to a pod; 0 if unknown


def end_event(*, failed: bool, refused: bool) -> str:
    """Return the event of a request's end."""
    return FAILED if failed else REFUSED if refused else DONE


@dataclass(eq=False)
class PodOutcomes:
    """Judges pods and the gateway by the ends of requests."""

    failures: PodFailures
    # Called with `SAME`, `RETRIED`, `OTHER` or `UNKNOWN` per logged request, and with `AGAIN`.
    served: Callable[[str], None]

    def __post_init__(self) -> None:
        self._repeated = RepeatedLog(_log)
        # True for each of the last compared requests that another pod served without a retry.
        self._ignored: deque[bool] = deque(maxlen=_COMPARED)
        # True for each of the last calls by ext_proc that followed another one for the same request.
        self._again: deque[bool] = deque(maxlen=_COMPARED)
        # Whether the access log repeats the ends of responses: only the log shows which pod served.
        self._is_repeated = False

    @property
    def picks_ignored(self) -> str | None:
        """Return the finding that the gateway ignores picks, as one sentence; None if it obeys."""
        again, ignored = sum(self._again.copy()), sum(self._ignored.copy())
        if again >= _IGNORED_MIN:
            return (
                f"your gateway asks for a pick again and again: {again} of the last {len(self._again)} calls "
                "were for a request that had one; call the picker from one filter per route"
            )
        if ignored < _IGNORED_MIN:
            return None
        return (
            f"your gateway ignores picks: {ignored} of the last {len(self._ignored)} requests were served by "
            "another pod than the picked one, without a retry; let no second picker or load balancer choose"
        )

    def ended(
        self, dispatch: Dispatch, report: RequestReport, now_s: float, *, is_known_fault: bool = False
    ) -> None:
        """Record the end of a request; `is_known_fault`: as a fault of the picked pod it is known."""
        picked, sent_s, pod = dispatch.pod, dispatch.dispatched_s, report.pod or dispatch.pod
        is_logged = report.source == ACCESS_LOG
        outcome = SAME if pod == picked else RETRIED if report.attempts > 1 else OTHER
        if not self.failures.load_table.is_declared(pod):
            # A proxy in between hides the pod.
            outcome, pod = UNKNOWN, picked
        if is_logged and report.pod is not None:
            self._compared(outcome, picked, pod)
        if outcome == RETRIED:
            # Envoy reports only its last attempt.
            self.failures.failed(picked, sent_s, now_s)
        if report.is_fault:
            if not (is_known_fault and pod == picked):
                self.failures.failed(pod, sent_s, now_s)
        elif report.event == DONE and (is_logged or not self._is_repeated):
            self.failures.succeeded(pod, sent_s)

    def called(self, request_id: str, *, again: bool) -> None:
        """Record a call by ext_proc; `again`: for a request that is in flight at the pod that it names."""
        self._again.append(again)
        if again:
            self.served(AGAIN)
            if (finding := self.picks_ignored) is not None:
                self._repeated.event("again", "gateway", "called again: id=%s %s", request_id, finding)

    def repeated(self, dispatch: Dispatch, was_fault: bool, report: RequestReport, now_s: float) -> None:
        """Record Envoy's log entry of a response whose end, as a fault of the picked pod or not, is known."""
        self._is_repeated = True
        self.ended(dispatch, report, now_s, is_known_fault=was_fault)

    def _compared(self, outcome: str, picked: str, pod: str) -> None:
        self.served(outcome)
        if outcome in (SAME, OTHER):
            self._ignored.append(outcome == OTHER)
        if outcome == OTHER and (finding := self.picks_ignored) is not None:
            text = "picks ignored: picked=%s served=%s finding=%s"
            self._repeated.event("picks_ignored", "gateway", text, picked, pod, finding)


class DuplicateEnds:
    """Filter of ends that Envoy's access log repeats after the response phase. Thread-safe.

    A log entry has only the request id, which may be in flight again by then: the entry must not end that
    request. Ends are kept per id, and expire if no log entry follows.
    """

    def __init__(self, capacity: int = 10_000) -> None:
        self._capacity = capacity
        # By request id: time of the latest end, and the ends, each with whether it was a fault.
        self._expected: OrderedDict[str, tuple[float, deque[tuple[Dispatch, bool]]]] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._expected)

    def expect(self, request_id: str, now_s: float, dispatch: Dispatch, was_fault: bool) -> None:
        """Expect a log entry for a request that the response phase has ended."""
        with self._lock:
            _, ends = self._expected.get(request_id) or (now_s, deque(maxlen=_DUPLICATES_PER_ID))
            ends.append((dispatch, was_fault))
            self._expected[request_id] = now_s, ends
            self._expected.move_to_end(request_id)
            if len(self._expected) > self._capacity:
                self._expected.popitem(last=False)

    def consume(self, request_id: str, now_s: float, pod: str | None) -> tuple[Dispatch, bool] | None:
        """Return the end that a log entry of this id and pod repeats, and forget it; None if none."""
        with self._lock:
            ended_s, ends = self._expected.pop(request_id, (now_s, None))
            if not ends or now_s - ended_s > _DUPLICATE_MAX_S:
                return None
            end = next((end for end in ends if end[0].pod == pod), ends[0])
            ends.remove(end)
            if ends:
                self._expected[request_id] = ended_s, ends
            return end
