"""Envoy's access log messages as they are read here: wire bytes in, messages out.

Envoy hands on a client's x-request-id as it came (in two fields), also where it is not the UTF-8 that a
protobuf text must be. One such id must not cost the whole batch, everybody's entries, so an entry's texts are
bytes here: the same on the wire.
"""

from __future__ import annotations

from typing import Any

from envoy.data.accesslog.v3 import accesslog_pb2
from envoy.service.accesslog.v3 import als_pb2
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass


def parse_log_message(data: bytes) -> Any:
    """Reads a StreamAccessLogsMessage whose entries hold bytes where Envoy's hold texts.

    Raises:
        google.protobuf.message.DecodeError: It is none.
    """
    return _MESSAGE_CLASS.FromString(data)


def _message_class() -> Any:
    pool = DescriptorPool()
    _copy(als_pb2.DESCRIPTOR, pool, set())
    return GetMessageClass(pool.FindMessageTypeByName(als_pb2.StreamAccessLogsMessage.DESCRIPTOR.full_name))


def _copy(file: FileDescriptor, pool: DescriptorPool, copied: set[str]) -> None:
    """Copies a file and what it imports, the texts of log entries made bytes."""
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
