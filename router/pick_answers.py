"""PickEndpoint's answers as bytes: a Decision in, a serialised PickEndpointResponse out.

Written field by field, since most of a pick's time in Python would go into making one message for each
candidate. The fields are those of proto/kvroute/v1/endpoint_picker.proto, in its encoding
(protobuf.dev/programming-guides/encoding).
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from compiled.direct import DirectKernel
from compiled.jit import inlined, kernel
from router.cost import CREDIT, PRICE
from router.decision import Decision
from router.pods import PodSet
from router.protobuf_bytes import field, varint
from router.ranking import Ranking

# Fields of PickEndpointResponse; the second is a message, `number << 3 | 2`.
_REQUEST_ID, _ENDPOINT, _REASON, _PROMPT_TOKENS, _DEGRADED = 1, 2 << 3 | 2, 3, bytes([4 << 3]), 5
# Of RankedEndpoint, from 3 on: a tag each (`number << 3 | 1`: eight bytes) and where cost.PRICE has it.
_PRICE_FIELDS = tuple(PRICE.names or ())
_NAMES = ("cost_s", "queued_prefill_s", "own_prefill_s", "copy_s", "kv_pressure_s")
_SECONDS = tuple((number << 3 | 1, _PRICE_FIELDS.index(name)) for number, name in enumerate(_NAMES, 3))
_SECONDS_BYTES = 9 * len(_SECONDS)
_PRICE_NUMBERS = len(_PRICE_FIELDS)
_CACHED_TOKENS = 8 << 3
# Of one candidate beside its texts, at most: two tags, its length and its tokens (64 bits), its seconds.
_NUMBERS_BYTES_MAX = 2 + 2 * 10 + _SECONDS_BYTES
_LINEUPS_MAX = 256

_BYTE, _SEVEN, _EIGHT = np.uint64(0xFF), np.uint64(7), np.uint64(8)
_CONTINUES = np.uint64(0x80)


class _Texts(msgspec.Struct, frozen=True):
    """What the same candidates' endpoints say in words, as long as it stays true.

    Attributes:
        views: Of each candidate.
        fields: uint8 [bytes], one candidate's behind the other's.
        ends: int64 [candidates + 1], where each begins, and where the last ends.
    """

    views: tuple[str, ...]
    fields: NDArray[np.uint8]
    ends: NDArray[np.int64]


class PickAnswers:
    """Writes answers; safe to share between threads.

    Args:
        pods: Tells pods' names.
    """

    def __init__(self, pods: PodSet) -> None:
        self._pods = pods
        self._generation = -1
        self._texts: dict[tuple[str, ...], _Texts] = {}
        self._compile()

    @property
    def remembered(self) -> int:
        """Line-ups of which texts are kept."""
        return len(self._texts)

    def answer(self, decision: Decision) -> bytes:
        """The whole answer."""
        ranked = decision.ranked
        texts = self._texts_of(ranked)
        endpoints = np.empty(len(texts.fields) + _NUMBERS_BYTES_MAX * len(ranked), np.uint8)
        bits, credits = ranked.prices.view(np.uint64), ranked.credits
        end = _write_endpoints.call(ranked.order, bits, credits, texts.fields, texts.ends, endpoints)
        degraded = decision.degraded
        return b"".join(
            (
                _text(_REQUEST_ID, decision.request_id),
                endpoints[:end].data,
                _text(_REASON, decision.reason),
                _PROMPT_TOKENS,
                varint(decision.prompt_tokens),
                b"" if degraded is None else _text(_DEGRADED, degraded),
            )
        )

    def _texts_of(self, ranked: Ranking) -> _Texts:
        # Read before the names: whoever changes them after this makes what is kept now outdated.
        generation = self._pods.generation
        if generation != self._generation or len(self._texts) >= _LINEUPS_MAX:
            self._texts, self._generation = {}, generation
        known, views = self._texts, ranked.views
        texts = known.get(ranked.pods)
        if texts is None or texts.views != views:
            texts = known[ranked.pods] = self._made(ranked.pods, views)
        return texts

    def _made(self, addresses: tuple[str, ...], views: tuple[str, ...]) -> _Texts:
        pods = self._pods.snapshot()
        names = [pods[address].name if address in pods else "" for address in addresses]
        texts = [
            _text(1, address) + _text(2, name) + _text(9, view)
            for address, name, view in zip(addresses, names, views, strict=True)
        ]
        ends = np.fromiter(accumulate(map(len, texts), initial=0), np.int64, len(texts) + 1)
        return _Texts(views, np.frombuffer(b"".join(texts), np.uint8), ends)

    def _compile(self) -> None:
        """Compiles the kernel (or loads it from its cache), so that the first request need not wait."""
        nobody, none = np.zeros(0, np.int64), np.zeros(0, np.uint8)
        prices, credits = np.zeros(0, PRICE), np.zeros(0, CREDIT)
        _write_endpoints.call(nobody, prices.view(np.uint64), credits, none, nobody, none)


@inlined
def _put_varint(value: int, out: NDArray[np.uint8], at: int) -> int:
    rest = np.uint64(value)
    while rest >= _CONTINUES:
        out[at] = rest & _BYTE | _CONTINUES
        rest >>= _SEVEN
        at += 1
    out[at] = rest
    return at + 1


@inlined
def _varint_bytes(value: int) -> int:
    rest, size = np.uint64(value), 1
    while rest >= _CONTINUES:
        rest >>= _SEVEN
        size += 1
    return size


@DirectKernel
@kernel
def _write_endpoints(
    order: NDArray[np.int64],
    prices: NDArray[np.uint64],
    credits: NDArray[Any],
    texts: NDArray[np.uint8],
    ends: NDArray[np.int64],
    out: NDArray[np.uint8],
) -> int:
    """Writes a RankedEndpoint for each candidate, best first; answers where the last one ends.

    Args:
        order: int64 [ranked], places in what follows.
        prices: uint64 [candidates x fields of cost.PRICE], the bits of the numbers.
        credits: CREDIT [candidates].
        texts: uint8 [bytes], as `_Texts.fields`.
        ends: int64 [candidates + 1], as `_Texts.ends`.
        out: uint8 [bytes], room enough.
    """
    at = 0
    for place in order:
        start, end, cached = ends[place], ends[place + 1], credits[place]["cached_tokens"]
        out[at] = _ENDPOINT
        at = _put_varint(end - start + _SECONDS_BYTES + 1 + _varint_bytes(cached), out, at + 1)
        for place_of_byte in range(start, end):
            out[at] = texts[place_of_byte]
            at += 1
        for tag, column in _SECONDS:
            out[at] = tag
            bits = prices[place * _PRICE_NUMBERS + column]
            for byte in range(1, 9):
                out[at + byte] = bits & _BYTE
                bits >>= _EIGHT
            at += 9
        out[at] = _CACHED_TOKENS
        at = _put_varint(cached, out, at + 1)
    return at


def _text(number: int, text: str) -> bytes:
    return field(number, text.encode("utf-8", "replace"))
