from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StreamState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STREAM_STATE_UNSPECIFIED: _ClassVar[StreamState]
    STREAM_STATE_EXACT: _ClassVar[StreamState]
    STREAM_STATE_RECOVERING: _ClassVar[StreamState]
    STREAM_STATE_STALE: _ClassVar[StreamState]
STREAM_STATE_UNSPECIFIED: StreamState
STREAM_STATE_EXACT: StreamState
STREAM_STATE_RECOVERING: StreamState
STREAM_STATE_STALE: StreamState

class ScoreRequest(_message.Message):
    __slots__ = ("model", "token_ids", "pods", "lora_name", "cache_salt")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PODS_FIELD_NUMBER: _ClassVar[int]
    LORA_NAME_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    model: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    pods: _containers.RepeatedScalarFieldContainer[str]
    lora_name: str
    cache_salt: str
    def __init__(self, model: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., pods: _Optional[_Iterable[str]] = ..., lora_name: _Optional[str] = ..., cache_salt: _Optional[str] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("pods", "block_tokens", "prompt_blocks")
    PODS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    pods: _containers.RepeatedCompositeFieldContainer[PodScore]
    block_tokens: int
    prompt_blocks: int
    def __init__(self, pods: _Optional[_Iterable[_Union[PodScore, _Mapping]]] = ..., block_tokens: _Optional[int] = ..., prompt_blocks: _Optional[int] = ...) -> None: ...

class PodScore(_message.Message):
    __slots__ = ("pod", "cached_blocks", "cached_tokens", "blocks_by_tier", "weighted_blocks", "state")
    class BlocksByTierEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    POD_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_BY_TIER_FIELD_NUMBER: _ClassVar[int]
    WEIGHTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    pod: str
    cached_blocks: int
    cached_tokens: int
    blocks_by_tier: _containers.ScalarMap[str, int]
    weighted_blocks: float
    state: StreamState
    def __init__(self, pod: _Optional[str] = ..., cached_blocks: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., blocks_by_tier: _Optional[_Mapping[str, int]] = ..., weighted_blocks: _Optional[float] = ..., state: _Optional[_Union[StreamState, str]] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsResponse(_message.Message):
    __slots__ = ("blocks", "capacity_blocks", "holdings", "evicted_blocks", "pods")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HOLDINGS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PODS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    capacity_blocks: int
    holdings: int
    evicted_blocks: int
    pods: _containers.RepeatedCompositeFieldContainer[PodStream]
    def __init__(self, blocks: _Optional[int] = ..., capacity_blocks: _Optional[int] = ..., holdings: _Optional[int] = ..., evicted_blocks: _Optional[int] = ..., pods: _Optional[_Iterable[_Union[PodStream, _Mapping]]] = ...) -> None: ...

class PodStream(_message.Message):
    __slots__ = ("pod", "model", "state")
    POD_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    pod: str
    model: str
    state: StreamState
    def __init__(self, pod: _Optional[str] = ..., model: _Optional[str] = ..., state: _Optional[_Union[StreamState, str]] = ...) -> None: ...
