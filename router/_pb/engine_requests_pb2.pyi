from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VllmRequest(_message.Message):
    __slots__ = ("tokenized", "text", "stream")
    class TokenizedInput(_message.Message):
        __slots__ = ("input_ids",)
        INPUT_IDS_FIELD_NUMBER: _ClassVar[int]
        input_ids: _containers.RepeatedScalarFieldContainer[int]
        def __init__(self, input_ids: _Optional[_Iterable[int]] = ...) -> None: ...
    TOKENIZED_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    tokenized: VllmRequest.TokenizedInput
    text: str
    stream: bool
    def __init__(self, tokenized: _Optional[_Union[VllmRequest.TokenizedInput, _Mapping]] = ..., text: _Optional[str] = ..., stream: _Optional[bool] = ...) -> None: ...

class VertexRequest(_message.Message):
    __slots__ = ("http_body",)
    class HttpBody(_message.Message):
        __slots__ = ("data",)
        DATA_FIELD_NUMBER: _ClassVar[int]
        data: bytes
        def __init__(self, data: _Optional[bytes] = ...) -> None: ...
    HTTP_BODY_FIELD_NUMBER: _ClassVar[int]
    http_body: VertexRequest.HttpBody
    def __init__(self, http_body: _Optional[_Union[VertexRequest.HttpBody, _Mapping]] = ...) -> None: ...
