"""PickEndpoint's answers as bytes: a Decision in, a serialised PickEndpointResponse out.

Written field by field, since most of a pick's time in Python would go into making one message for each
candidate. The fields are those of proto/kvroute/v1/endpoint_picker.proto, in its encoding
(protobuf.dev/programming-guides/encoding).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from struct import Struct

from router.decision import Decision
from router.protobuf_bytes import field, varint

# Fields of RankedEndpoint, 3 to 7: a tag (number << 3 | 1: eight bytes) in front of each.
_SECONDS = Struct("<BdBdBdBdBd")
_COST, _QUEUED, _OWN, _COPY, _PRESSURE = (number << 3 | 1 for number in range(3, 8))
_CACHED_TOKENS = bytes([8 << 3])
# Fields of PickEndpointResponse.
_REQUEST_ID, _ENDPOINT, _REASON, _PROMPT_TOKENS, _DEGRADED = 1, 2, 3, bytes([4 << 3]), 5


def pick_answer(decision: Decision, pod_name: Callable[[str], str]) -> bytes:
    """The whole answer.

    Args:
        pod_name: A pod's name by its address.
    """
    parts = [_text(_REQUEST_ID, decision.request_id)]
    for pod, price, cached_tokens, view in decision.ranked.priced():
        cost_s, queued_s, own_s, _, copy_s, pressure_s = price[:6]
        seconds = _SECONDS.pack(
            _COST, cost_s, _QUEUED, queued_s, _OWN, own_s, _COPY, copy_s, _PRESSURE, pressure_s
        )
        cached = _CACHED_TOKENS + varint(cached_tokens)
        parts.append(
            field(_ENDPOINT, b"".join((_identity(pod, pod_name(pod)), seconds, cached, _view(view))))
        )
    parts.append(_text(_REASON, decision.reason))
    parts.append(_PROMPT_TOKENS + varint(decision.prompt_tokens))
    if decision.degraded is not None:
        parts.append(_text(_DEGRADED, decision.degraded))
    return b"".join(parts)


@lru_cache(maxsize=4096)
def _identity(address: str, pod_name: str) -> bytes:
    return _text(1, address) + _text(2, pod_name)


@lru_cache(maxsize=16)
def _view(view: str) -> bytes:
    return _text(9, view)


def _text(number: int, text: str) -> bytes:
    return field(number, text.encode("utf-8", "replace"))
