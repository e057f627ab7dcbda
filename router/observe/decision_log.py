"""Log of the latest decisions with their costs and request lifecycles, for the debug pages and metrics.

Bounded; decisions are converted to JSON-ready records only when requested. Knows no HTTP. Times are seconds
of the router's monotonic clock, except `time`, which is Unix time.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from threading import Lock
from typing import Any

import msgspec
from cachetools import LRUCache

from indexer import DispatchKey
from router.inflight.dispatch import Dispatch
from router.observe.metrics import RouterMetrics
from router.picking.decision import Decision

# Converting one candidate takes some microseconds.
_PODS_MAX = 20_000
_MODELS_MAX = 1000
# The mean of a model's output tokens forgets: its last answers weigh most.
_ANSWERS_MEMORY = 100


class _Record(msgspec.Struct, eq=False):
    decision: Decision
    unix_s: float
    prefill_end: dict[str, Any] | None = None
    end: dict[str, Any] | None = None
    delivered_cached_tokens: int | None = None
    output_tokens: int | None = None
    model_output_tokens: float | None = None  # mean of the model when the request was decided
    prefix_break: dict[str, Any] | None = None


# Fields of a record that keep their names in JSON.
_OF_DECISION = (
    *("request_id", "kind", "model", "reason", "prefill_pod", "degraded", "partial", "prompt_tokens"),
    *("priority", "rank", "sequences", "session_pod"),
)
_OF_RECORD = tuple(name for name in _Record.__struct_fields__ if name not in ("decision", "unix_s"))


@dataclass(eq=False)
class DecisionLog:
    """Latest decisions by request id, whose lifecycles are also counted. Thread-safe."""

    capacity: int  # decisions kept; the oldest is dropped first
    pod_name: Callable[[str], str]  # returns a pod's name by its address
    metrics: RouterMetrics
    # Candidates of all decisions kept, including filtered ones, weighted by the number of prompts. Limits
    # memory: with hundreds of pods, fewer decisions are kept.
    candidates_max: int = 100_000
    # Called with each ended dispatch, and its cached and output tokens if they were reported.
    on_end: Callable[[DispatchKey, int | None, int | None], None] = lambda *_: None

    def __post_init__(self) -> None:
        self._candidates = 0
        self._decided = 0
        self._records: OrderedDict[str, _Record] = OrderedDict()
        # Mean output tokens by model, and the number of answers behind it.
        self._output_tokens = LRUCache[str | None, tuple[float, int]](_MODELS_MAX)
        self._lock = Lock()

    def decided(self, decision: Decision) -> None:
        """Record a decision; called before any report on its request."""
        record, request_id = _Record(decision, time.time()), decision.request_id
        with self._lock:
            self._decided += 1
            record.model_output_tokens = self._output_tokens.get(decision.model, (None, 0))[0]
            if (old := self._records.pop(request_id, None)) is not None:
                self._candidates -= old.decision.ranked.memory_weight
            self._records[request_id] = record
            self._candidates += decision.ranked.memory_weight
            while len(self._records) > self.capacity or (
                self._candidates > self.candidates_max and len(self._records) > 1
            ):
                _, oldest = self._records.popitem(last=False)
                self._candidates -= oldest.decision.ranked.memory_weight

    def prefill_ended(self, dispatch: Dispatch, source: str, now_s: float) -> None:
        """Record the reported or presumed end of a prefill."""
        self.metrics.observe("prefill_end_seconds", now_s - dispatch.dispatched_s, source)
        with self._lock:
            if record := self._record_of(dispatch.request_id, dispatch):
                record.prefill_end = {"source": source, "after_s": now_s - record.decision.decided_s}

    def ended(
        self,
        request_id: str,
        source: str,
        now_s: float,
        *,
        failed: bool,
        late_s: float | None = None,
        cached_tokens: int | None = None,
        output_tokens: int | None = None,
        dispatch: Dispatch | None = None,
        pod: str | None = None,
    ) -> None:
        """Record the end of a request, and its cached tokens beside the predicted ones.

        Args:
            late_s: Seconds since the end, if the source reports them.
            cached_tokens: Prompt tokens that the engine served from its cache, if reported.
            output_tokens: Tokens of the complete answer, all its samples, if reported.
            dispatch: The request in flight that ended, if known; selects among requests of one id.
            pod: Pod of the request, if `dispatch` is unknown.
        """
        if dispatch is not None:
            self.on_end(dispatch.key, cached_tokens, output_tokens)
            self.metrics.count("request_ends", source, "failed" if failed else "done")
            if late_s is not None:
                self.metrics.observe("told_late_seconds", late_s, "end", source)
        with self._lock:
            record = self._record_of(request_id, dispatch, pod)
            if record is None:
                return
            decision, reported = record.decision, record.delivered_cached_tokens
            after_s = now_s - decision.decided_s
            record.end = record.end or {"source": source, "after_s": after_s, "failed": failed}
            if output_tokens is not None and record.output_tokens is None:
                record.output_tokens = output_tokens
                mean, answers = self._output_tokens.get(decision.model, (0.0, 0))
                answers = min(answers + 1, _ANSWERS_MEMORY)
                mean += (output_tokens / decision.sequences - mean) / answers
                self._output_tokens[decision.model] = mean, answers
            if cached_tokens is None:
                return
            record.delivered_cached_tokens = cached_tokens
        # Picks by load alone, usage that counts other prompts or samples, and hits of a prefill on another
        # pod are not comparable.
        is_predicted = not decision.degraded and decision.prefill_pod is None and decision.sequences == 1
        if reported is None and is_predicted:
            self.metrics.count("compared_predicted_cached_tokens", number=decision.primary.cached_tokens)
            self.metrics.count("delivered_cached_tokens", number=cached_tokens)
            model = self.metrics.model_label(decision.model or "")
            self.metrics.count("told_prompt_tokens", model, "all", number=decision.prompt_tokens)
            self.metrics.count("told_prompt_tokens", model, "cached", number=cached_tokens)

    def prefix_broke(self, request_id: str, record: dict[str, Any]) -> None:
        """Record where a decision's prompt left the last one of its session."""
        with self._lock:
            if (known := self._records.get(request_id)) is not None:
                known.prefix_break = record

    def reported_late(self, event: str, source: str, late_s: float) -> None:
        """Record the seconds between the first report of an event and this source's."""
        self.metrics.observe("told_late_seconds", late_s, event, source)

    def latest(self, count: int, *, pods_max: int = _PODS_MAX) -> list[dict[str, Any]]:
        """Return the latest `count` decisions, newest first; fewer if they have over `pods_max` pods."""
        with self._lock:
            records = list(islice(reversed(self._records.values()), count))
        converted: list[dict[str, Any]] = []
        for record in records:
            pods_max -= len(record.decision.ranked.pods) + len(record.decision.excluded)
            if pods_max < 0 and converted:
                break
            converted.append(self._converted(record))
        return converted

    def find(self, request_id: str, *, brief: bool = False) -> dict[str, Any] | None:
        """Return the record of a request; `brief` leaves out its candidates."""
        with self._lock:
            record = self._records.get(request_id)
        if record is None:
            return None
        return self._summary(record) if brief else self._converted(record)

    def sample(self, after: int | None, count: int) -> tuple[int, list[dict[str, Any]]]:
        """Return up to `count` decisions since the first `after` ones, newest first.

        Args:
            after: The number that the last call returned, for an evenly spaced sample; None: the latest.

        Returns:
            The number of decisions so far, and the sample without its candidates.
        """
        with self._lock:
            decided, new = self._decided, len(self._records)
            new = min(new, count if after is None else decided - after)
            records = list(islice(reversed(self._records.values()), 0, new, -(-new // count) or 1))
        return decided, [self._summary(record) for record in records]

    def cached_shares(self) -> dict[str, float]:
        """Return, by pod, the cached share of the prompt tokens of the decisions kept, as far as known."""
        cached, prompt = Counter[str](), Counter[str]()
        with self._lock:
            records = list(self._records.values())
        for record in records:
            decision, delivered = record.decision, record.delivered_cached_tokens
            best = decision.primary
            if decision.degraded is None:
                cached[best.pod] += best.cached_tokens if delivered is None else delivered
                prompt[best.pod] += decision.prompt_tokens
        return {pod: min(1.0, cached[pod] / tokens) for pod, tokens in prompt.items() if tokens}

    def converted(self, decision: Decision) -> dict[str, Any]:
        """Return the record that a decision would have, without keeping it."""
        with self._lock:
            output_tokens = self._output_tokens.get(decision.model, (None, 0))[0]
        return self._converted(_Record(decision, time.time(), model_output_tokens=output_tokens))

    def _record_of(
        self, request_id: str, dispatch: Dispatch | None, pod: str | None = None
    ) -> _Record | None:
        """Return the id's record unless it is of another request of the id. The lock must be held."""
        record = self._records.get(request_id)
        if record is None:
            return None
        if dispatch is not None:
            return record if dispatch.dispatched_s == record.decision.decided_s else None
        return record if pod is None or pod == record.decision.primary.pod else None

    def _converted(self, record: _Record) -> dict[str, Any]:
        decision = record.decision
        scores: Mapping[str, float] = {}
        excluded = decision.excluded
        if decision.pipeline is not None:
            scores, excluded = decision.pipeline.scores, {**excluded, **decision.pipeline.excluded}
        return {
            **self._summary(record),
            "candidates": [
                {
                    **msgspec.structs.asdict(candidate),
                    "score": scores.get(candidate.pod),
                    "cached_tokens_by_tier": decision.ranked.cached_tokens_by_tier(at),
                    "pod_name": self.pod_name(candidate.pod),
                }
                for at, candidate in enumerate(decision.ranked)
            ],
            "excluded": [{"pod": pod, "reason": reason} for pod, reason in excluded.items()],
        }

    def _summary(self, record: _Record) -> dict[str, Any]:
        """Return what a decision's record has besides its candidates."""
        decision, ranked, best = record.decision, record.decision.ranked, record.decision.primary
        return {
            "time": record.unix_s,
            **{name: getattr(decision, name) for name in _OF_DECISION},
            **{name: getattr(record, name) for name in _OF_RECORD},
            "pod": best.pod,
            "pod_name": self.pod_name(best.pod),
            "predicted_cached_tokens": best.cached_tokens,
            "own_weight": best.own_weight,
            "predicted_s": best.cost_s,
            "tokens_by_cause": ranked.causes.tokens,
            "evicted_s_ago": ranked.causes.evicted_s_ago,
            "best_cached_tokens": ranked.most_cached_tokens,
            "block_tokens": ranked.block_tokens,
        }
