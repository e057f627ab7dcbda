from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PickEndpointRequest(_message.Message):
    __slots__ = ("request_id", "model", "prompt", "chat", "token_ids", "headers", "candidates", "cache_salt", "max_endpoints")
    class HeadersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    MAX_ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    prompt: str
    chat: ChatInput
    token_ids: TokenIds
    headers: _containers.ScalarMap[str, str]
    candidates: _containers.RepeatedScalarFieldContainer[str]
    cache_salt: str
    max_endpoints: int
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., prompt: _Optional[str] = ..., chat: _Optional[_Union[ChatInput, _Mapping]] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., headers: _Optional[_Mapping[str, str]] = ..., candidates: _Optional[_Iterable[str]] = ..., cache_salt: _Optional[str] = ..., max_endpoints: _Optional[int] = ...) -> None: ...

class ChatInput(_message.Message):
    __slots__ = ("messages_json", "tools_json", "options_json")
    MESSAGES_JSON_FIELD_NUMBER: _ClassVar[int]
    TOOLS_JSON_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_JSON_FIELD_NUMBER: _ClassVar[int]
    messages_json: bytes
    tools_json: bytes
    options_json: bytes
    def __init__(self, messages_json: _Optional[bytes] = ..., tools_json: _Optional[bytes] = ..., options_json: _Optional[bytes] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class PickEndpointResponse(_message.Message):
    __slots__ = ("request_id", "endpoints", "reason", "prompt_tokens", "degraded", "data_parallel_rank")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_RANK_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    endpoints: _containers.RepeatedCompositeFieldContainer[RankedEndpoint]
    reason: str
    prompt_tokens: int
    degraded: str
    data_parallel_rank: int
    def __init__(self, request_id: _Optional[str] = ..., endpoints: _Optional[_Iterable[_Union[RankedEndpoint, _Mapping]]] = ..., reason: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., degraded: _Optional[str] = ..., data_parallel_rank: _Optional[int] = ...) -> None: ...

class RankedEndpoint(_message.Message):
    __slots__ = ("address", "pod_name", "cost_s", "queued_prefill_s", "own_prefill_s", "copy_s", "kv_pressure_s", "cached_tokens", "view")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    POD_NAME_FIELD_NUMBER: _ClassVar[int]
    COST_S_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    OWN_PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    COPY_S_FIELD_NUMBER: _ClassVar[int]
    KV_PRESSURE_S_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    address: str
    pod_name: str
    cost_s: float
    queued_prefill_s: float
    own_prefill_s: float
    copy_s: float
    kv_pressure_s: float
    cached_tokens: int
    view: str
    def __init__(self, address: _Optional[str] = ..., pod_name: _Optional[str] = ..., cost_s: _Optional[float] = ..., queued_prefill_s: _Optional[float] = ..., own_prefill_s: _Optional[float] = ..., copy_s: _Optional[float] = ..., kv_pressure_s: _Optional[float] = ..., cached_tokens: _Optional[int] = ..., view: _Optional[str] = ...) -> None: ...

class ReportOutcomeRequest(_message.Message):
    __slots__ = ("request_id", "outcome", "cached_tokens", "address")
    class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        OUTCOME_UNSPECIFIED: _ClassVar[ReportOutcomeRequest.Outcome]
        OUTCOME_FIRST_TOKEN: _ClassVar[ReportOutcomeRequest.Outcome]
        OUTCOME_DONE: _ClassVar[ReportOutcomeRequest.Outcome]
        OUTCOME_FAILED: _ClassVar[ReportOutcomeRequest.Outcome]
    OUTCOME_UNSPECIFIED: ReportOutcomeRequest.Outcome
    OUTCOME_FIRST_TOKEN: ReportOutcomeRequest.Outcome
    OUTCOME_DONE: ReportOutcomeRequest.Outcome
    OUTCOME_FAILED: ReportOutcomeRequest.Outcome
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    outcome: ReportOutcomeRequest.Outcome
    cached_tokens: int
    address: str
    def __init__(self, request_id: _Optional[str] = ..., outcome: _Optional[_Union[ReportOutcomeRequest.Outcome, str]] = ..., cached_tokens: _Optional[int] = ..., address: _Optional[str] = ...) -> None: ...

class ReportOutcomeResponse(_message.Message):
    __slots__ = ("known",)
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    known: bool
    def __init__(self, known: _Optional[bool] = ...) -> None: ...
