"""gRPC health service (grpc.health.v1) of the router, and the names of the router's gRPC services."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from router._pb import endpoint_picker_pb2

EXT_PROC_SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
CHECK_SERVICE = "envoy.service.auth.v3.Authorization"
ACCESS_LOG_SERVICE = "envoy.service.accesslog.v3.AccessLogService"
PICK_SERVICE = endpoint_picker_pb2.DESCRIPTOR.services_by_name["EndpointPicker"].full_name

_FOLLOW_READINESS = ("", "readiness", "inference-extension", EXT_PROC_SERVICE, CHECK_SERVICE, PICK_SERVICE)
_ALWAYS_SERVING = "liveness"


class Health:
    """Health service; starts as NOT_SERVING."""

    def __init__(self) -> None:
        self._servicer = _AnyService()
        self.ready = False
        self._servicer.set(_ALWAYS_SERVING, health_pb2.HealthCheckResponse.SERVING)
        self._publish()

    def set_ready(self, ready: bool) -> None:
        """Set the readiness and notify the clients of `Watch` of a change."""
        if ready != self.ready:
            self.ready = ready
            self._publish()

    def add_to(self, server: grpc.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    def _publish(self) -> None:
        status = health_pb2.HealthCheckResponse
        for service in _FOLLOW_READINESS:
            self._servicer.set(service, status.SERVING if self.ready else status.NOT_SERVING)


class _AnyService(health.HealthServicer):  # type: ignore[misc]
    """Health servicer that reports readiness for unknown service names, as the reference picker does."""

    def Check(  # noqa: N802 (the name is gRPC's)
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        known = request.service in (*_FOLLOW_READINESS, _ALWAYS_SERVING)
        return super().Check(request if known else health_pb2.HealthCheckRequest(), context)
