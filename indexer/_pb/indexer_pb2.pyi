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

class PrefixEnd(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PREFIX_END_UNSPECIFIED: _ClassVar[PrefixEnd]
    PREFIX_END_PROMPT: _ClassVar[PrefixEnd]
    PREFIX_END_HOLE: _ClassVar[PrefixEnd]
    PREFIX_END_OTHER_ATTENTION: _ClassVar[PrefixEnd]
    PREFIX_END_DRAFTER: _ClassVar[PrefixEnd]
    PREFIX_END_CHECKPOINT: _ClassVar[PrefixEnd]
STREAM_STATE_UNSPECIFIED: StreamState
STREAM_STATE_EXACT: StreamState
STREAM_STATE_RECOVERING: StreamState
STREAM_STATE_STALE: StreamState
PREFIX_END_UNSPECIFIED: PrefixEnd
PREFIX_END_PROMPT: PrefixEnd
PREFIX_END_HOLE: PrefixEnd
PREFIX_END_OTHER_ATTENTION: PrefixEnd
PREFIX_END_DRAFTER: PrefixEnd
PREFIX_END_CHECKPOINT: PrefixEnd

class SnapshotRequest(_message.Message):
    __slots__ = ("schema", "instance", "fingerprint", "form", "tiers", "engine", "model")
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    schema: int
    instance: str
    fingerprint: int
    form: str
    tiers: _containers.RepeatedScalarFieldContainer[str]
    engine: str
    model: str
    def __init__(self, schema: _Optional[int] = ..., instance: _Optional[str] = ..., fingerprint: _Optional[int] = ..., form: _Optional[str] = ..., tiers: _Optional[_Iterable[str]] = ..., engine: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class SnapshotChunk(_message.Message):
    __slots__ = ("message",)
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    message: bytes
    def __init__(self, message: _Optional[bytes] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("model", "token_ids", "pods", "lora_name", "cache_salt", "text")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PODS_FIELD_NUMBER: _ClassVar[int]
    LORA_NAME_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    model: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    pods: _containers.RepeatedScalarFieldContainer[str]
    lora_name: str
    cache_salt: str
    text: str
    def __init__(self, model: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., pods: _Optional[_Iterable[str]] = ..., lora_name: _Optional[str] = ..., cache_salt: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class ScoreBatchRequest(_message.Message):
    __slots__ = ("prompts",)
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    prompts: _containers.RepeatedCompositeFieldContainer[ScoreRequest]
    def __init__(self, prompts: _Optional[_Iterable[_Union[ScoreRequest, _Mapping]]] = ...) -> None: ...

class ScoreBatchResponse(_message.Message):
    __slots__ = ("responses",)
    RESPONSES_FIELD_NUMBER: _ClassVar[int]
    responses: _containers.RepeatedCompositeFieldContainer[ScoreResponse]
    def __init__(self, responses: _Optional[_Iterable[_Union[ScoreResponse, _Mapping]]] = ...) -> None: ...

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

class ExplainPrefixResponse(_message.Message):
    __slots__ = ("engines", "block_tokens", "prompt_blocks")
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    engines: _containers.RepeatedCompositeFieldContainer[EngineExplanation]
    block_tokens: int
    prompt_blocks: int
    def __init__(self, engines: _Optional[_Iterable[_Union[EngineExplanation, _Mapping]]] = ..., block_tokens: _Optional[int] = ..., prompt_blocks: _Optional[int] = ...) -> None: ...

class EngineExplanation(_message.Message):
    __slots__ = ("engine", "state", "reason", "cached_blocks", "end", "held_blocks", "held_beyond", "tiers", "drafter", "proven_blocks", "end_proven", "evicted_seconds_ago", "faults")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HELD_BEYOND_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    PROVEN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    END_PROVEN_FIELD_NUMBER: _ClassVar[int]
    EVICTED_SECONDS_AGO_FIELD_NUMBER: _ClassVar[int]
    FAULTS_FIELD_NUMBER: _ClassVar[int]
    engine: str
    state: StreamState
    reason: str
    cached_blocks: int
    end: PrefixEnd
    held_blocks: int
    held_beyond: int
    tiers: _containers.RepeatedCompositeFieldContainer[TierRun]
    drafter: str
    proven_blocks: int
    end_proven: bool
    evicted_seconds_ago: float
    faults: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, engine: _Optional[str] = ..., state: _Optional[_Union[StreamState, str]] = ..., reason: _Optional[str] = ..., cached_blocks: _Optional[int] = ..., end: _Optional[_Union[PrefixEnd, str]] = ..., held_blocks: _Optional[int] = ..., held_beyond: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[TierRun, _Mapping]]] = ..., drafter: _Optional[str] = ..., proven_blocks: _Optional[int] = ..., end_proven: _Optional[bool] = ..., evicted_seconds_ago: _Optional[float] = ..., faults: _Optional[_Iterable[str]] = ...) -> None: ...

class TierRun(_message.Message):
    __slots__ = ("tier", "blocks")
    TIER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    tier: str
    blocks: int
    def __init__(self, tier: _Optional[str] = ..., blocks: _Optional[int] = ...) -> None: ...

class ClearRequest(_message.Message):
    __slots__ = ("pods",)
    PODS_FIELD_NUMBER: _ClassVar[int]
    pods: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, pods: _Optional[_Iterable[str]] = ...) -> None: ...

class ClearResponse(_message.Message):
    __slots__ = ("pods",)
    PODS_FIELD_NUMBER: _ClassVar[int]
    pods: int
    def __init__(self, pods: _Optional[int] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsResponse(_message.Message):
    __slots__ = ("blocks", "capacity_blocks", "holdings", "evicted_blocks", "pods", "used_bytes", "capacity_bytes", "block_tokens", "pending")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HOLDINGS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PODS_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    capacity_blocks: int
    holdings: int
    evicted_blocks: int
    pods: _containers.RepeatedCompositeFieldContainer[PodStream]
    used_bytes: int
    capacity_bytes: int
    block_tokens: int
    pending: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, blocks: _Optional[int] = ..., capacity_blocks: _Optional[int] = ..., holdings: _Optional[int] = ..., evicted_blocks: _Optional[int] = ..., pods: _Optional[_Iterable[_Union[PodStream, _Mapping]]] = ..., used_bytes: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., block_tokens: _Optional[int] = ..., pending: _Optional[_Iterable[str]] = ...) -> None: ...

class PodStream(_message.Message):
    __slots__ = ("pod", "model", "state", "reason", "rank", "linked")
    POD_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    LINKED_FIELD_NUMBER: _ClassVar[int]
    pod: str
    model: str
    state: StreamState
    reason: str
    rank: int
    linked: bool
    def __init__(self, pod: _Optional[str] = ..., model: _Optional[str] = ..., state: _Optional[_Union[StreamState, str]] = ..., reason: _Optional[str] = ..., rank: _Optional[int] = ..., linked: _Optional[bool] = ...) -> None: ...
