"""Makes noise about what the parity watch finds: metrics, a warning now and then, and lines for /ready.

A disagreement about tokens costs every hit of a pod and breaks nothing else, so nobody would notice it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable

from indexer.metrics import IndexerMetrics
from indexer.parity import Mismatch, ParityWatch, PodParity

_log = logging.getLogger(__name__)

_LINES_MAX = 20


class ParityAlarm:
    """Tells what a watch finds.

    Args:
        watch: The watch; requests are ended here, so that nothing it finds is lost.
        metrics: Where mismatches are counted.
        warn_every_s: Shortest time between two warnings.
    """

    def __init__(self, watch: ParityWatch, metrics: IndexerMetrics, *, warn_every_s: float = 60.0) -> None:
        self._watch = watch
        self._metrics = metrics
        self._warn_every_s = warn_every_s
        self._mismatch_warned_s = -math.inf
        self._never_hit_warned_s = -math.inf

    def settled(self, request_id: Hashable, now_s: float) -> str | None:
        """See `ParityWatch.settled`; returns the pod that a mismatch was found at, None for none."""
        mismatch = self._watch.settled(request_id)
        if mismatch is None:
            return None
        self._metrics.parity_mismatches.labels(mismatch.pod, mismatch.model).inc()
        if now_s - self._mismatch_warned_s >= self._warn_every_s:
            self._mismatch_warned_s = now_s
            _log.warning("%s", _mismatch_line(mismatch))
        return mismatch.pod

    def check(self, now_s: float) -> None:
        """Shows which pods never store what is computed for them; to be called every few seconds."""
        for parity in self._watch.report():
            self._metrics.parity_never_hit.labels(parity.pod).set(parity.never_hit)
            if parity.never_hit and now_s - self._never_hit_warned_s >= self._warn_every_s:
                self._never_hit_warned_s = now_s
                _log.warning("%s", _never_hit_line(parity))

    def forget_pod(self, pod: str) -> None:
        """The pod is gone; its series go too."""
        self._watch.forget_pod(pod)
        for metric in (self._metrics.parity_mismatches, self._metrics.parity_never_hit):
            metric.remove_by_labels({"pod": pod})

    def details(self) -> list[str]:
        """One line for each pod that is distrusted, at most 20."""
        distrusted = [parity for parity in self._watch.report() if parity.distrusted]
        return [
            _never_hit_line(parity) if parity.last_mismatch is None else _mismatch_line(parity.last_mismatch)
            for parity in distrusted[:_LINES_MAX]
        ]


def _mismatch_line(mismatch: Mismatch) -> str:
    return (
        f"pod {mismatch.pod} computes other tokens of model {mismatch.model!r} than we do (request "
        f"{mismatch.request_id}): they differ from token {mismatch.position} of the prompt on (digest of "
        f"ours {mismatch.computed}, of the engine's {mismatch.stored}); its predictions are not believed "
        "meanwhile; compare tokenizer and template"
    )


def _never_hit_line(parity: PodParity) -> str:
    return (
        f"pod {parity.pod} stores blocks, but for the last {parity.unmet_in_a_row} requests of model "
        f"{parity.model!r} none of the blocks that we computed: no prefix will ever hit there; compare "
        "model name, adapter name and tokenizer"
    )
