"""Published payloads to arrays of events and hashes: the fast way from bytes to what kernels apply.

Payloads of one or many pods come in, rows go out (see `event_rows`). Events that are not plain are left to
`decode.decode_event`. Nothing here knows pods, sequences or keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import msgspec
import numpy as np
from numpy.typing import NDArray

from indexer import event_rows as rows
from indexer.parse_kernels import parse_payloads

_EVENTS_AT_FIRST = 1024
# Arrays that one call made longer than this are given back with the next call: 48 MiB of hashes and tokens,
# 9 MiB of events.
_KEPT_BYTES = 4 << 20
_KEPT_EVENTS = 65_536


class Parsed(msgspec.Struct, frozen=True):
    """What was read, all views of the parser's own arrays: valid until its next call.

    Attributes:
        data: The payloads, joined: uint8 [bytes]. An oversize payload is left out.
        batches: A row for each payload, in order: int64 [payloads, BATCH_COLUMNS].
        events: A row for each event, batch by batch: int64 [events, EVENT_COLUMNS].
        hashes: The hashes of all events of a known kind: uint64 [at least as many].
        tokens: Their tokens: uint32 [at least as many].
        kinds: How many of the events are of each kind, by KIND.
        all_read: Whether all batches are OK.
    """

    data: NDArray[np.uint8]
    batches: NDArray[np.int64]
    events: NDArray[np.int64]
    hashes: NDArray[np.uint64]
    tokens: NDArray[np.uint32]
    kinds: list[int]
    all_read: bool

    def event_bytes(self, row: int) -> bytes:
        """The msgpack of one event, a copy: what `decode.decode_event` reads of an event of kind OTHER."""
        return self.data[self.events[row, rows.START] : self.events[row, rows.END]].tobytes()


class EventParser:
    """Parses payloads into arrays that it keeps for the next call.

    They grow to the call's payloads, to 24 bytes for each byte of payload and 136 for each event, but take
    memory only where something was written: 8 bytes a hash, 4 a token. What an unusually large call took is
    given back with the next one. For one thread at a time.

    Args:
        max_bytes: A longer payload is not read and its batch is OVERSIZE.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._batches = np.empty((0, rows.BATCH_COLUMNS), np.int64)
        self._events = np.empty((_EVENTS_AT_FIRST, rows.EVENT_COLUMNS), np.int64)
        self._hashes = np.empty(0, np.uint64)
        self._tokens = np.empty(0, np.uint32)
        self._found = np.zeros(rows.FOUND, np.int64)

    def parse(self, payloads: Sequence[bytes]) -> Parsed:
        """Reads payloads, whatever they hold; a payload that is no batch costs its neighbours nothing."""
        lengths = list(map(len, payloads))
        oversize: list[int] = []
        if max(lengths, default=0) > self._max_bytes:
            oversize = [place for place, length in enumerate(lengths) if length > self._max_bytes]
            payloads = [payload if len(payload) <= self._max_bytes else b"" for payload in payloads]
            lengths = list(map(len, payloads))
        data = np.frombuffer(b"".join(payloads), np.uint8)
        ends = np.array([*accumulate(lengths)], np.int64)
        self._make_room(len(payloads), len(data))
        while True:
            arrays = self._batches, self._events, self._hashes, self._tokens
            events = parse_payloads.call(data, ends, *arrays, self._found)
            if events <= len(self._events):
                break
            room = max(events, min(2 * len(self._events), _KEPT_EVENTS))
            self._events = np.empty((room, rows.EVENT_COLUMNS), np.int64)
        batches = self._batches[: len(payloads)]
        if oversize:
            batches[oversize, rows.STATUS] = rows.OVERSIZE
        *kinds, broken = self._found.tolist()
        return Parsed(data, batches, self._events[:events], self._hashes, self._tokens, kinds, not broken)

    def _make_room(self, payloads: int, data_bytes: int) -> None:
        """A hash and a token take a byte of payload at least; so much is claimed, not used."""
        if payloads > len(self._batches):
            self._batches = np.empty((2 * payloads, rows.BATCH_COLUMNS), np.int64)
        if len(self._events) > _KEPT_EVENTS:
            self._events = np.empty((_KEPT_EVENTS, rows.EVENT_COLUMNS), np.int64)
        if data_bytes > len(self._hashes) or len(self._hashes) > _KEPT_BYTES:
            room = max(data_bytes, min(2 * data_bytes, _KEPT_BYTES))
            self._hashes = np.empty(room, np.uint64)
            self._tokens = np.empty(room, np.uint32)
