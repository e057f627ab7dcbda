"""Envoy's access log as a source of request reports: batches of log entries in, ended requests out.

Joins by request id. Nothing is learnt of speed here: engines send their headers before the first token, so
the time to the first byte is not the time to the first token.
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
from google.protobuf.message_factory import GetMessageClass

from indexer.pod_entry import pod_address
from router.doors.health import ACCESS_LOG_SERVICE
from router.feedback.lifecycle import ACCESS_LOG, Lifecycle
from router.h2 import GrpcServer
from router.h2.exchange_call import ExchangeMethod
from router.observe.metrics import RouterMetrics

_CLIENT_ERROR, _SERVER_ERROR = 400, 500
# How Envoy explains an answer of its own where one of our doors has refused the request.
_REFUSALS = (b"ext_authz_denied", b"kvroute")
_NO_BODIES = (RequestMethod.GET, RequestMethod.HEAD)


@dataclass(frozen=True, slots=True)
class AccessLogDoor:
    """envoy.service.accesslog.v3.AccessLogService."""

    lifecycle: Lifecycle
    metrics: RouterMetrics
    distrust: Callable[[str, str], None]  # told of a pod that Envoy could not connect to (address, why)

    # As an exchange: nothing that a stream brings waits for anything.
    finished, is_routed = False, True

    def add_to(self, server: GrpcServer) -> None:
        """Register the service, with a reading of messages that is kinder than the generated one."""
        method = ExchangeMethod(
            lambda _call: self,
            _MESSAGE_CLASS.FromString,
            als_pb2.StreamAccessLogsResponse.SerializeToString,
        )
        server.add_exchange(f"/{ACCESS_LOG_SERVICE}/StreamAccessLogs", method)

    def answers(self, message: Any) -> tuple[()]:
        for join, entries in Counter(map(self._taken, message.http_logs.log_entry)).items():
            self.metrics.count("logged", join, number=entries)
        return ()

    def last(self) -> Iterable[als_pb2.StreamAccessLogsResponse]:
        return (als_pb2.StreamAccessLogsResponse(),)

    def close(self) -> None:
        pass

    def _taken(self, entry: Any) -> str:
        """Takes an entry; what it joined."""
        common = entry.common_properties
        if common.intermediate_log_entry:
            return "intermediate"
        address = common.upstream_remote_address.socket_address
        pod = pod_address(address.address, address.port_value)
        if common.response_flags.upstream_connection_failure:
            self.distrust(pod, "Envoy could not connect to it")
        # Decoded as ext_proc decodes the header, so that a strange id joins, too.
        request_id = entry.request.request_id.decode("utf-8", "replace")
        if not request_id:
            return "no_request_id"
        failed = _has_failed(entry)
        if _was_no_work(entry, failed):
            # Another request under its id may be in flight.
            return "no_work"
        ended = self.lifecycle.ended(
            request_id,
            ACCESS_LOG,
            time.monotonic(),
            pod=pod,
            failed=failed,
            refused=entry.response.response_code.value >= _CLIENT_ERROR,
            late_s=_late_s(common),
        )
        if ended is not None:
            return "joined"
        return "other_router" if self.lifecycle.is_remote(request_id) else "unknown"


def _has_failed(entry: Any) -> bool:
    # Any flag on an answer (cut by either side, timed out) means that it was not delivered whole.
    code = entry.response.response_code.value
    flags = entry.common_properties.response_flags
    return code == 0 or code >= _SERVER_ERROR or bool(flags.ListFields())


def _was_no_work(entry: Any, failed: bool) -> bool:
    """Whether no pod was charged with it: it was refused here, or has no body."""
    if entry.response.response_code_details in _REFUSALS:
        return True
    request = entry.request
    # Of one that was cut off the body may not have come yet.
    return not request.request_body_bytes and (not failed or request.request_method in _NO_BODIES)


def _late_s(common: Any) -> float | None:
    """How long ago the last byte went to the client, by the clock that this machine shares with Envoy's."""
    if not common.HasField("start_time") or not common.HasField("time_to_last_downstream_tx_byte"):
        return None
    started_s = common.start_time.seconds + common.start_time.nanos / 1e9
    took = common.time_to_last_downstream_tx_byte
    late_s: float = time.time() - started_s - took.seconds - took.nanos / 1e9
    return late_s


def _message_class() -> Any:
    """Return the class of StreamAccessLogsMessages whose entries hold bytes where Envoy's hold texts.

    Envoy hands on a client's x-request-id as it came (in two fields), also where it is not the UTF-8 that a
    protobuf text must be. One such id must not cost the whole batch, everybody's entries. Bytes are the same
    on the wire.
    """
    pool = DescriptorPool()
    _copy(als_pb2.DESCRIPTOR, pool, set())
    return GetMessageClass(pool.FindMessageTypeByName(als_pb2.StreamAccessLogsMessage.DESCRIPTOR.full_name))


def _copy(file: FileDescriptor, pool: DescriptorPool, copied: set[str]) -> None:
    """Copy a file and what it imports, the texts of log entries made bytes."""
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
