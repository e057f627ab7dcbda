"""The last decisions over gRPC: ExplainRequest in, what explain keeps out.

Translates; what is kept, and for how long, is explain's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc

from router._pb import endpoint_picker_pb2 as pb
from router._pb import endpoint_picker_pb2_grpc as pb_grpc
from router.explain import Explain

_COUNT_DEFAULT = 20
# Clients take messages of up to 4 MiB, unless told otherwise.
_ANSWER_BYTES = 4_000_000


class ExplainDoor(pb_grpc.DecisionLogServicer):
    """kvroute.v1.DecisionLog."""

    def __init__(self, explain: Explain) -> None:
        self._explain = explain

    def Explain(  # noqa: N802 (the name is the proto's)
        self, request: pb.ExplainRequest, _context: grpc.ServicerContext
    ) -> pb.ExplainResponse:
        """Answers the last decisions, or the one asked for."""
        if request.request_id:
            record = self._explain.one(request.request_id)
            records = [record] if record is not None else []
        else:
            records = self._explain.latest(request.count or _COUNT_DEFAULT)
        return pb.ExplainResponse(decisions=_fitting(records))


def _fitting(records: Iterable[dict[str, Any]]) -> list[pb.ExplainedDecision]:
    """As many decisions as an answer has room for, but at least one."""
    decisions, room_bytes = list[pb.ExplainedDecision](), _ANSWER_BYTES
    for record in records:
        decision = _decision(record)
        room_bytes -= decision.ByteSize()
        if room_bytes < 0 and decisions:
            break
        decisions.append(decision)
    return decisions


def _decision(record: dict[str, Any]) -> pb.ExplainedDecision:
    return pb.ExplainedDecision(
        request_id=record["request_id"],
        time=record["time"],
        kind=record["kind"],
        model=record["model"],
        reason=record["reason"],
        prefill_pod=record["prefill_pod"],
        degraded=record["degraded"],
        partial=record["partial"],
        priority=record["priority"],
        session_pod=record["session_pod"],
        prompt_tokens=record["prompt_tokens"],
        predicted_cached_tokens=record["predicted_cached_tokens"],
        best_cached_tokens=record["best_cached_tokens"],
        delivered_cached_tokens=record["delivered_cached_tokens"],
        candidates=[_candidate(candidate) for candidate in record["candidates"]],
        excluded={other["pod"]: other["reason"] for other in record["excluded"]},
        prefill_end=_end(record["prefill_end"]),
        end=_end(record["end"]),
    )


def _candidate(candidate: dict[str, Any]) -> pb.ExplainedCandidate:
    names = pb.RankedEndpoint.DESCRIPTOR.fields_by_name.keys() & candidate.keys()
    endpoint = pb.RankedEndpoint(address=candidate["pod"], **{name: candidate[name] for name in names})
    names = pb.ExplainedCandidate.DESCRIPTOR.fields_by_name.keys() & candidate.keys()
    return pb.ExplainedCandidate(endpoint=endpoint, **{name: candidate[name] for name in names})


def _end(end: dict[str, Any] | None) -> pb.ExplainedEnd | None:
    return None if end is None else pb.ExplainedEnd(**end)
