from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TokenUsage(_message.Message):
    __slots__ = ("output_tokens", "input_token_details", "extraction_status")
    class Count(_message.Message):
        __slots__ = ("value",)
        VALUE_FIELD_NUMBER: _ClassVar[int]
        value: int
        def __init__(self, value: _Optional[int] = ...) -> None: ...
    class InputTokenDetails(_message.Message):
        __slots__ = ("cached_tokens",)
        CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
        cached_tokens: TokenUsage.Count
        def __init__(self, cached_tokens: _Optional[_Union[TokenUsage.Count, _Mapping]] = ...) -> None: ...
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    INPUT_TOKEN_DETAILS_FIELD_NUMBER: _ClassVar[int]
    EXTRACTION_STATUS_FIELD_NUMBER: _ClassVar[int]
    output_tokens: TokenUsage.Count
    input_token_details: TokenUsage.InputTokenDetails
    extraction_status: int
    def __init__(self, output_tokens: _Optional[_Union[TokenUsage.Count, _Mapping]] = ..., input_token_details: _Optional[_Union[TokenUsage.InputTokenDetails, _Mapping]] = ..., extraction_status: _Optional[int] = ...) -> None: ...
