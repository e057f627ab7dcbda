from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Api(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    API_UNSPECIFIED: _ClassVar[Api]
    API_CHAT: _ClassVar[Api]
    API_COMPLETIONS: _ClassVar[Api]
    API_RESPONSES: _ClassVar[Api]
    API_MESSAGES: _ClassVar[Api]
API_UNSPECIFIED: Api
API_CHAT: Api
API_COMPLETIONS: Api
API_RESPONSES: Api
API_MESSAGES: Api

class TokenizeRequest(_message.Message):
    __slots__ = ("model", "api", "body", "context_tokens", "reads_media")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    API_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    READS_MEDIA_FIELD_NUMBER: _ClassVar[int]
    model: str
    api: Api
    body: bytes
    context_tokens: int
    reads_media: bool
    def __init__(self, model: _Optional[str] = ..., api: _Optional[_Union[Api, str]] = ..., body: _Optional[bytes] = ..., context_tokens: _Optional[int] = ..., reads_media: _Optional[bool] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("prompts", "total", "degraded", "partial", "refusal", "media")
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    prompts: _containers.RepeatedScalarFieldContainer[bytes]
    total: int
    degraded: str
    partial: str
    refusal: Refusal
    media: _containers.RepeatedCompositeFieldContainer[PromptMedia]
    def __init__(self, prompts: _Optional[_Iterable[bytes]] = ..., total: _Optional[int] = ..., degraded: _Optional[str] = ..., partial: _Optional[str] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ..., media: _Optional[_Iterable[_Union[PromptMedia, _Mapping]]] = ...) -> None: ...

class PromptMedia(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[MediaItem]
    def __init__(self, items: _Optional[_Iterable[_Union[MediaItem, _Mapping]]] = ...) -> None: ...

class MediaItem(_message.Message):
    __slots__ = ("identifier", "offset", "length")
    IDENTIFIER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    identifier: str
    offset: int
    length: int
    def __init__(self, identifier: _Optional[str] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("message", "param")
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    message: str
    param: str
    def __init__(self, message: _Optional[str] = ..., param: _Optional[str] = ...) -> None: ...
