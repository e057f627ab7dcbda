"""Snapshots of an engine's cache: fetched from its model server over HTTP, or from other routers.

`GET /kv_events/snapshot` answers with one msgpack map: `schema` 1, `boot_id` of the process, `sequence`
(number of the first batch that is not in the snapshot), `block_size`, `blocks` (copies of blocks) and
`batches`, payloads in the format of published batches. Applied in order to an empty view they give the
content of the cache.

vLLM's snapshot socket gives the same over ZMQ, in the form of its pull request 57789 (2026-09), which was not
merged when this was written. The request is "snapshot". The answer has the number of the last batch included
(signed, 8 bytes; -1: none, -2: unavailable), the publisher's id (16 bytes) and payloads.

The engine is asked first and peers after it, on worker threads, so that the
subscriber's thread never waits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec
import urllib3
import zmq

from indexer.config import IndexerConfig, PodStream
from indexer.errors import PayloadError
from indexer.views.view_parts import ViewSnapshot

SCHEMA = 1

_SEQUENCE_MAX = (1 << 64) - 2

_log = logging.getLogger(__name__)
_NOT_OFFERED = frozenset({404, 405, 501})
_PIECE_BYTES = 1 << 18
_CONNECT_S = 3.0
_POLL_MS = 250
# Read timeout; short, so that a silent server does not delay `close`.
_IDLE_S = 5.0


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Content of an engine's cache at one sequence number."""

    schema: int
    boot_id: str
    sequence: int  # number of the stream's first batch that is not in the snapshot
    block_size: int
    blocks: int  # copies of blocks in the snapshot
    batches: list[bytes]  # payloads, parents before children


@dataclass(frozen=True, slots=True, eq=False)
class Fetched:
    """Result of a snapshot request to an engine and then to other sources."""

    answer: Snapshot | ViewSnapshot | None  # from the engine, or a view of another router; None: unavailable
    size_bytes: int = 0  # size of its messages
    refusal: str | None = None  # why the engine sent none; None if it did or was not asked
    source: str = "engine"  # "engine", "peer" or "redis"


_DECODER = msgspec.msgpack.Decoder(Snapshot)


def read_snapshot(data: bytes) -> Snapshot:
    """Decode the body of an engine's answer.

    Raises:
        PayloadError: The body is malformed or of another schema.
    """
    try:
        snapshot = _DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PayloadError("broken", str(error)) from None
    if snapshot.schema != SCHEMA:
        raise PayloadError("schema", f"expected snapshot schema {SCHEMA}, got {snapshot.schema}")
    if not 0 <= snapshot.sequence <= _SEQUENCE_MAX:
        raise PayloadError("sequence", f"sequence: expected 0..{_SEQUENCE_MAX}, got {snapshot.sequence}")
    return snapshot


def read_reply(frames: Sequence[bytes]) -> Snapshot:
    """Decode an answer of vLLM's snapshot socket.

    Raises:
        PayloadError: The answer is malformed, or the engine has no snapshot.
    """
    if [len(frame) for frame in frames[:2]] != [8, 16]:
        raise PayloadError("broken", f"an answer of {len(frames)} frames")
    last = int.from_bytes(frames[0], "big", signed=True)
    if last < -1:
        raise PayloadError("refused", "the engine's snapshot recorder has stopped")
    return Snapshot(
        schema=SCHEMA,
        boot_id=frames[1].hex(),
        sequence=last + 1,
        block_size=0,
        blocks=0,
        batches=list(frames[2:]),
    )


# Function from a stream to a view, None if unavailable, and the view's size in bytes.
SnapshotSource = Callable[[PodStream], tuple[ViewSnapshot | None, int]]


class SnapshotFetcher:
    """Worker pool that fetches snapshots from engines and other sources."""

    def __init__(self, config: IndexerConfig, others: Mapping[str, SnapshotSource]) -> None:
        token, at_once = config.admin_token, config.concurrent_snapshots
        self._authorization = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._max_bytes = config.snapshot_max_bytes
        self._total_s = config.snapshot_total_s
        self._others = others  # by name; asked in this order if the engine has no snapshot
        self._closing = threading.Event()
        self._http = urllib3.PoolManager(
            num_pools=at_once, retries=False, timeout=urllib3.Timeout(connect=_CONNECT_S, read=_IDLE_S)
        )
        self._workers = ThreadPoolExecutor(at_once, "kvroute-snapshots")

    def fetch(self, stream: PodStream, deliver: Callable[[Fetched], None], *, others: bool) -> None:
        self._workers.submit(self._run, stream, deliver, self._others if others else {})

    def close(self) -> None:
        self._closing.set()
        self._workers.shutdown(cancel_futures=True)
        self._http.clear()

    def _run(
        self, stream: PodStream, deliver: Callable[[Fetched], None], others: Mapping[str, SnapshotSource]
    ) -> None:
        try:
            fetched = Fetched(None) if stream.snapshot_url is None else self._from_engine(stream)
            for source, ask in others.items():
                if fetched.answer is None:
                    snapshot, size_bytes = ask(stream)
                    fetched = Fetched(snapshot, size_bytes, fetched.refusal, source)
        except Exception:
            _log.exception("snapshot failed: pod=%s", stream.holder)
            fetched = Fetched(None, refusal="internal_error")
        deliver(fetched)

    def _from_engine(self, stream: PodStream) -> Fetched:
        url = stream.snapshot_url or ""
        try:
            if url.startswith("tcp://"):
                frames = self._ask(url)
                return Fetched(read_reply(frames), sum(map(len, frames)))
            body = self._get(url, self._authorization if stream.snapshot_admin else {})
            return Fetched(read_snapshot(body), len(body))
        except PayloadError as error:
            return Fetched(None, refusal=error.reason)
        except (urllib3.exceptions.HTTPError, zmq.ZMQError, OSError, ValueError) as error:
            _log.info("snapshot unavailable: url=%s error=%s", url, error)
            return Fetched(None, refusal="unreachable")

    def _ask(self, endpoint: str) -> list[bytes]:
        ends_s = time.monotonic() + self._total_s
        with zmq.Context() as context, context.socket(zmq.REQ) as asked:
            asked.linger, asked.maxmsgsize, asked.ipv6 = 0, self._max_bytes, "[" in endpoint
            asked.connect(endpoint)
            asked.send(b"snapshot")
            while not asked.poll(_POLL_MS):
                if time.monotonic() > ends_s or self._closing.is_set():
                    raise PayloadError("timeout", f"not answered within {self._total_s:g} s")
            frames = asked.recv_multipart()
        if sum(map(len, frames)) > self._max_bytes:
            raise PayloadError("too_large", f"more than {self._max_bytes} bytes")
        return frames

    def _get(self, url: str, headers: Mapping[str, str]) -> bytes:
        ends_s = time.monotonic() + self._total_s
        response = self._http.request(
            "GET", url, headers=headers, preload_content=False, decode_content=False, redirect=False
        )
        try:
            if response.status in (401, 403):
                _log.warning(
                    "snapshot refused, the view needs a replay or a peer: url=%s status=%d; "
                    "--admin-token-file must hold the model server's token, and the pod's label "
                    "kvroute.io/admin-port name its port",
                    url,
                    response.status,
                )
            if response.status != 200:
                reason = "not_offered" if response.status in _NOT_OFFERED else "refused"
                raise PayloadError(reason, f"status {response.status}")
            body = bytearray()
            # read1 returns what has arrived, so that a slow body cannot exceed the total timeout.
            while piece := response.read1(_PIECE_BYTES):
                body += piece
                if len(body) > self._max_bytes:
                    raise PayloadError("too_large", f"more than {self._max_bytes} bytes")
                if time.monotonic() > ends_s or self._closing.is_set():
                    raise PayloadError("timeout", f"not read within {self._total_s:g} s")
        finally:
            # Do not reuse the connection: the rest of the body is unread.
            response.close()
        return bytes(body)
