"""Envoy's access log service (ALS): reports the ends of requests, joined by request id.

Prefill rates are not estimated from it: engines send their headers before the first token, so the time to the
first byte is not the time to the first token. Envoy 1.40 adds the usage that it read in the response, as
`envoy.data.ai.v3.TokenUsage`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from envoy.config.core.v3.base_pb2 import RequestMethod
from envoy.data.accesslog.v3 import accesslog_pb2
from envoy.service.accesslog.v3 import als_pb2
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from indexer.pod_entry import pod_address
from router._pb.token_usage_pb2 import TokenUsage
from router.doors.health import ACCESS_LOG_SERVICE
from router.feedback.lifecycle import Lifecycle
from router.feedback.outcomes import ACCESS_LOG, RequestReport, end_event
from router.h2 import GrpcServer
from router.h2.exchange_call import Exchange, ExchangeMethod
from router.observe.metrics import RouterMetrics

_CLIENT_ERROR, _SERVER_ERROR, _NOT_IMPLEMENTED = 400, 500, 501
# Response flags that only the pod can cause.
_FAULTS = (
    "upstream_connection_failure",
    "upstream_connection_termination",
    "upstream_protocol_error",
    "upstream_remote_reset",
)
# Envoy's response_code_details of requests that ext_authz or ext_proc rejected.
_REFUSALS = (b"ext_authz_denied", b"kvroute")
_USAGE = "envoy.ai.token_usage"
_EXTRACTION_FAILED = 3
_TOKENS_MAX = 2**31 - 1
_NO_BODIES = (RequestMethod.GET, RequestMethod.HEAD)


@dataclass(frozen=True)
class AccessLogService(Exchange):
    """gRPC service envoy.service.accesslog.v3.AccessLogService, which processes entries without waiting."""

    lifecycle: Lifecycle
    metrics: RouterMetrics
    on_connection_failure: Callable[[str, str], None]  # called with the pod's address and the reason

    def add_to(self, server: GrpcServer) -> None:
        """Register the service, with a message class that accepts invalid UTF-8."""
        method = ExchangeMethod(
            lambda _call: self,
            _MESSAGE_CLASS.FromString,
            als_pb2.StreamAccessLogsResponse.SerializeToString,
        )
        server.add_exchange(f"/{ACCESS_LOG_SERVICE}/StreamAccessLogs", method)

    def answers(self, message: Any) -> tuple[()]:
        for join, entries in Counter(map(self._process, message.http_logs.log_entry)).items():
            self.metrics.count("access_log_entries", join, number=entries)
        return ()

    def last(self) -> Iterable[als_pb2.StreamAccessLogsResponse]:
        return (als_pb2.StreamAccessLogsResponse(),)

    def _process(self, entry: Any) -> str:
        """Process a log entry; return the result of the join as a metric label."""
        common = entry.common_properties
        if common.intermediate_log_entry:
            return "intermediate"
        address = common.upstream_remote_address.socket_address
        # Without an address, the request was sent to no pod.
        pod = pod_address(address.address, address.port_value) if address.address else None
        if pod is not None and common.response_flags.upstream_connection_failure:
            self.on_connection_failure(pod, "Envoy could not connect to it")
        # Decoded as in ext_proc, so that ids with invalid UTF-8 match.
        request_id = entry.request.request_id.decode("utf-8", "replace")
        if not request_id:
            return "no_request_id"
        failed = _has_failed(entry)
        if _is_not_charged(entry, failed):
            # Another request with the same id may be in flight.
            return "no_work"
        refused = entry.response.response_code.value >= _CLIENT_ERROR
        cached_tokens, output_tokens, usage = _usage(common, failed=failed)
        report = RequestReport(
            request_id,
            end_event(failed=failed, refused=refused),
            ACCESS_LOG,
            pod,
            _late_s(common),
            cached_tokens,
            output_tokens,
            is_fault=_is_fault(entry),
            attempts=common.upstream_request_attempt_count,
        )
        if self.lifecycle.ended(report, time.monotonic()) is not None:
            self.metrics.count("response_usage", "refused" if refused and not failed else usage)
            return "joined"
        return "other_router" if self.lifecycle.is_remote(request_id) else "unknown"


def _usage(common: Any, *, failed: bool) -> tuple[int | None, int | None, str]:
    """Return cached and output tokens that Envoy read in a response, and how it went, as a metric label."""
    found = common.metadata.typed_filter_metadata
    if _USAGE not in found:
        return None, None, "aborted" if failed else "untold"
    try:
        usage = TokenUsage.FromString(found[_USAGE].value)
    except DecodeError:
        return None, None, "unreadable"
    cached_tokens = _count(usage.input_token_details, "cached_tokens")
    output_tokens = _count(usage, "output_tokens")
    if cached_tokens is not None:
        return cached_tokens, output_tokens, "told"
    return None, output_tokens, "unreadable" if usage.extraction_status == _EXTRACTION_FAILED else "untold"


def _count(message: Any, field: str) -> int | None:
    value: int = getattr(message, field).value
    return value if message.HasField(field) and value <= _TOKENS_MAX else None


def _has_failed(entry: Any) -> bool:
    # Any response flag (reset by either side, timeout) means that the response is incomplete.
    code = entry.response.response_code.value
    flags = entry.common_properties.response_flags
    return code == 0 or code >= _SERVER_ERROR or bool(flags.ListFields())


def _is_fault(entry: Any) -> bool:
    """Return whether the pod failed the request, and not the client, a time limit or Envoy."""
    flags, details = entry.common_properties.response_flags, entry.response.response_code_details
    if any(getattr(flags, name) for name in _FAULTS):
        return True
    code = entry.response.response_code.value
    is_pods = details == b"via_upstream" if details else not flags.ListFields()
    return bool(code >= _SERVER_ERROR and code != _NOT_IMPLEMENTED and is_pods)


def _is_not_charged(entry: Any, failed: bool) -> bool:
    """Return whether the request was never in the ledger: it was rejected here or had no body."""
    if entry.response.response_code_details in _REFUSALS:
        return True
    request = entry.request
    # A reset request may have had a body that Envoy had not received yet.
    return not request.request_body_bytes and (not failed or request.request_method in _NO_BODIES)


def _late_s(common: Any) -> float | None:
    """Return the seconds since Envoy, whose clock must agree, sent the last byte; None if not logged."""
    if not common.HasField("start_time") or not common.HasField("time_to_last_downstream_tx_byte"):
        return None
    started_s = common.start_time.seconds + common.start_time.nanos / 1e9
    took = common.time_to_last_downstream_tx_byte
    late_s: float = time.time() - started_s - took.seconds - took.nanos / 1e9
    return late_s


def _message_class() -> Any:
    """Return a class of StreamAccessLogsMessage whose entries have bytes fields instead of string fields."""
    # Envoy copies a client's x-request-id into two of them even if it is not UTF-8, for which the original
    # class rejects the whole batch. Both types have the same wire format.
    pool = DescriptorPool()
    _copy(als_pb2.DESCRIPTOR, pool, set())
    return GetMessageClass(pool.FindMessageTypeByName(als_pb2.StreamAccessLogsMessage.DESCRIPTOR.full_name))


def _copy(file: FileDescriptor, pool: DescriptorPool, copied: set[str]) -> None:
    """Copy a proto file and its imports to `pool`, with bytes for the strings of log entries."""
    if file.name in copied:
        return
    copied.add(file.name)
    for imported in file.dependencies:
        _copy(imported, pool, copied)
    proto = FileDescriptorProto()
    file.CopyToProto(proto)
    if file.name == accesslog_pb2.DESCRIPTOR.name:
        for field in (field for message in proto.message_type for field in message.field):
            if field.type == FieldDescriptorProto.TYPE_STRING:
                field.type = FieldDescriptorProto.TYPE_BYTES
    pool.Add(proto)


_MESSAGE_CLASS = _message_class()
