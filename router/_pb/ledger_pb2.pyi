from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FollowRequest(_message.Message):
    __slots__ = ("schema", "instance", "fingerprint")
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    schema: int
    instance: str
    fingerprint: int
    def __init__(self, schema: _Optional[int] = ..., instance: _Optional[str] = ..., fingerprint: _Optional[int] = ...) -> None: ...

class LedgerNews(_message.Message):
    __slots__ = ("sent", "overdue", "prefilled", "ended", "heard")
    SENT_FIELD_NUMBER: _ClassVar[int]
    OVERDUE_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    HEARD_FIELD_NUMBER: _ClassVar[int]
    sent: _containers.RepeatedCompositeFieldContainer[SentRequest]
    overdue: _containers.RepeatedScalarFieldContainer[int]
    prefilled: _containers.RepeatedScalarFieldContainer[int]
    ended: _containers.RepeatedScalarFieldContainer[int]
    heard: _containers.RepeatedCompositeFieldContainer[Outcome]
    def __init__(self, sent: _Optional[_Iterable[_Union[SentRequest, _Mapping]]] = ..., overdue: _Optional[_Iterable[int]] = ..., prefilled: _Optional[_Iterable[int]] = ..., ended: _Optional[_Iterable[int]] = ..., heard: _Optional[_Iterable[_Union[Outcome, _Mapping]]] = ...) -> None: ...

class SentRequest(_message.Message):
    __slots__ = ("number", "pod", "prefill_pod", "uncached_tokens", "age_s", "adapter", "keys", "is_prefilled", "request_id")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    POD_FIELD_NUMBER: _ClassVar[int]
    PREFILL_POD_FIELD_NUMBER: _ClassVar[int]
    UNCACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    IS_PREFILLED_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    number: int
    pod: str
    prefill_pod: str
    uncached_tokens: int
    age_s: float
    adapter: str
    keys: bytes
    is_prefilled: bool
    request_id: str
    def __init__(self, number: _Optional[int] = ..., pod: _Optional[str] = ..., prefill_pod: _Optional[str] = ..., uncached_tokens: _Optional[int] = ..., age_s: _Optional[float] = ..., adapter: _Optional[str] = ..., keys: _Optional[bytes] = ..., is_prefilled: _Optional[bool] = ..., request_id: _Optional[str] = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("request_id", "event", "source", "pod", "late_s", "cached_tokens")
    class Event(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        EVENT_UNSPECIFIED: _ClassVar[Outcome.Event]
        EVENT_FIRST_TOKEN: _ClassVar[Outcome.Event]
        EVENT_DONE: _ClassVar[Outcome.Event]
        EVENT_FAILED: _ClassVar[Outcome.Event]
        EVENT_REFUSED: _ClassVar[Outcome.Event]
    EVENT_UNSPECIFIED: Outcome.Event
    EVENT_FIRST_TOKEN: Outcome.Event
    EVENT_DONE: Outcome.Event
    EVENT_FAILED: Outcome.Event
    EVENT_REFUSED: Outcome.Event
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    POD_FIELD_NUMBER: _ClassVar[int]
    LATE_S_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    event: Outcome.Event
    source: str
    pod: str
    late_s: float
    cached_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., event: _Optional[_Union[Outcome.Event, str]] = ..., source: _Optional[str] = ..., pod: _Optional[str] = ..., late_s: _Optional[float] = ..., cached_tokens: _Optional[int] = ...) -> None: ...
