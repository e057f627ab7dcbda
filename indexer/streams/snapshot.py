"""The state of an engine's cache as its model server tells it: asked for over HTTP, batches of events out.

`GET /kv_events/snapshot` answers with one msgpack map: `schema` 1, `boot_id` of the process, `sequence`
(number of the first batch that is not in it), `block_size`, `blocks` (copies told) and `batches`, payloads of
the very form that is published. Applied in order to an empty view they give what the cache holds. The engine
is asked first, then our peers are, on threads of their own, so that the events' thread never waits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec
import urllib3

from indexer.config import IndexerConfig, PodStream
from indexer.errors import PayloadError
from indexer.views.view_parts import ViewSnapshot

SCHEMA = 1

_SEQUENCE_MAX = (1 << 64) - 2

_log = logging.getLogger(__name__)
_NOT_OFFERED = frozenset({404, 405, 501})
_PIECE_BYTES = 1 << 18
_CONNECT_S = 3.0
# Without a byte for this long it has failed, so that `close` is not kept waiting by a silent server.
_IDLE_S = 5.0


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of an engine's cache at one moment."""

    schema: int
    boot_id: str
    sequence: int  # number of the first batch of its stream that is not in here
    block_size: int
    blocks: int  # copies of blocks in here
    batches: list[bytes]  # payloads, parents before children


@dataclass(frozen=True, slots=True, eq=False)
class Fetched:
    """Result of asking an engine, and then our peers, for a snapshot."""

    answer: Snapshot | ViewSnapshot | None  # the engine's, or another router's view; None: nobody gave one
    size_bytes: int = 0  # of its messages
    refusal: str | None = None  # why the engine itself gave none; None where it did, or was not asked
    source: str = "engine"  # who gave it: "engine", "peer" or "redis"


_DECODER = msgspec.msgpack.Decoder(Snapshot)


def read_snapshot(data: bytes) -> Snapshot:
    """Reads the body of an answer.

    Raises:
        PayloadError: It is none, or of another form.
    """
    try:
        snapshot = _DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PayloadError("broken", str(error)) from None
    if snapshot.schema != SCHEMA:
        raise PayloadError("schema", f"snapshots of version {SCHEMA} are read, not {snapshot.schema}")
    if not 0 <= snapshot.sequence <= _SEQUENCE_MAX:
        raise PayloadError("sequence", f"{snapshot.sequence} is no sequence number")
    return snapshot


# A stream in, a view or None and its size in bytes out.
Ask = Callable[[PodStream], tuple[ViewSnapshot | None, int]]


class SnapshotFetcher:
    """Fetches several at once."""

    def __init__(self, config: IndexerConfig, others: Mapping[str, Ask]) -> None:
        token, at_once = config.admin_token, config.concurrent_snapshots
        self._authorization = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._max_bytes = config.snapshot_max_bytes
        self._total_s = config.snapshot_total_s
        self._others = others  # by source; asked in this order for what an engine does not tell
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

    def _run(self, stream: PodStream, deliver: Callable[[Fetched], None], others: Mapping[str, Ask]) -> None:
        try:
            fetched = Fetched(None) if stream.snapshot_url is None else self._of_engine(stream)
            for source, ask in others.items():
                if fetched.answer is None:
                    snapshot, size_bytes = ask(stream)
                    fetched = Fetched(snapshot, size_bytes, fetched.refusal, source)
        except Exception:
            _log.exception("snapshot of %s", stream.holder)
            fetched = Fetched(None, refusal="internal_error")
        deliver(fetched)

    def _of_engine(self, stream: PodStream) -> Fetched:
        url = stream.snapshot_url or ""
        try:
            body = self._get(url, self._authorization if stream.snapshot_admin else {})
            return Fetched(read_snapshot(body), len(body))
        except PayloadError as error:
            return Fetched(None, refusal=error.reason)
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            _log.info("no snapshot from %s: %s", url, error)
            return Fetched(None, refusal="unreachable")

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
            # read1 gives what is there: a body that trickles in cannot outlast the time in all.
            while piece := response.read1(_PIECE_BYTES):
                body += piece
                if len(body) > self._max_bytes:
                    raise PayloadError("too_large", f"more than {self._max_bytes} bytes")
                if time.monotonic() > ends_s or self._closing.is_set():
                    raise PayloadError("timeout", f"not read within {self._total_s:g} s")
        finally:
            # Not to be used again: what is left of the body is nobody's.
            response.close()
        return bytes(body)
