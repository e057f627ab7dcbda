"""Clients of our own gRPC services, by the descriptors of their protocol files."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from router._pb import endpoint_picker_pb2, tokenizer_pb2


def picker_stub(channel: grpc.Channel) -> Any:
    """Return a client of kvroute.v1.EndpointPicker, with a callable for each method."""
    return _stub(channel, endpoint_picker_pb2.DESCRIPTOR.services_by_name["EndpointPicker"])


def tokenizer_stub(channel: grpc.Channel) -> Any:
    """Return a client of kvroute.v1.Tokenizer, with a callable for each method."""
    return _stub(channel, tokenizer_pb2.DESCRIPTOR.services_by_name["Tokenizer"])


def _stub(channel: grpc.Channel, service: ServiceDescriptor) -> Any:
    calls: dict[str, Any] = {
        method.name: channel.unary_unary(
            f"/{service.full_name}/{method.name}",
            GetMessageClass(method.input_type).SerializeToString,
            GetMessageClass(method.output_type).FromString,
        )
        for method in service.methods
    }
    return SimpleNamespace(**calls)
