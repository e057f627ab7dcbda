"""Service and client of kvroute.v1.IndexPeer: send view snapshots to peers, and fetch theirs.

Requests of peers run on a gRPC server's threads, and the export of the view on the subscriber's thread. The
client runs on the workers of `SnapshotFetcher`; answers are validated by `messages` and limited in total
time.
"""

from __future__ import annotations

import logging
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field

import grpc

from indexer._pb import indexer_pb2 as pb
from indexer._pb import indexer_pb2_grpc as pb_grpc
from indexer.config import IndexerConfig, PodStream
from indexer.errors import ConfigError, PeerError
from indexer.metrics import IndexerMetrics
from indexer.peers.messages import FORM, MESSAGE_BYTES_MAX, SCHEMA, read_messages, snapshot_messages
from indexer.views.view_parts import ViewSnapshot

_log = logging.getLogger(__name__)

PEER_SERVICE = pb.DESCRIPTOR.services_by_name["IndexPeer"].full_name

_AT_ONCE = 4
_CODES = {
    "not_followed": grpc.StatusCode.NOT_FOUND,
    "busy": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "timeout": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "internal_error": grpc.StatusCode.INTERNAL,
}
_OVERHEAD_BYTES = 4096
_CONNECT_MS = 3000
# An unreachable peer is not asked again for this time, because snapshots of many engines may be needed.
DOWN_S = 5.0
_ADDRESSES_MAX = 64
# Pause before a busy peer is asked again.
_BUSY_S = 0.25
# Reasons of a peer's refusal that may become labels of our metrics.
_REASONS = frozenset(
    {
        *("self", "schema", "fingerprint", "backend", "tiers", "not_followed"),
        *("stale", "recovering", "unproven", "orphans", "part_runs"),
        *("busy", "too_large", "changed", "timeout", "internal_error"),
    }
)
# Usual reasons, logged at INFO: the peer is this process, or has no usable view either.
_USUAL = frozenset({"self", "recovering", "unproven", "unreachable"})


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """Properties of an index that must match before two processes exchange views.

    Block keys are comparable only with the same seed and block size. The fingerprint proves knowledge of the
    seed without revealing it; requests without it are rejected.
    """

    fingerprint: int  # see `BlockHasher.fingerprint`
    tiers: tuple[str, ...]  # names of the tiers, best first; a tier's number is its index
    instance: str = field(default_factory=lambda: secrets.token_hex(16))  # unique per process

    def request(self, engine: str, model: str) -> pb.SnapshotRequest:
        return pb.SnapshotRequest(
            schema=SCHEMA,
            instance=self.instance,
            fingerprint=self.fingerprint,
            form=FORM,
            tiers=self.tiers,
            engine=engine,
            model=model,
        )

    def admit(self, request: pb.SnapshotRequest) -> None:
        """Check that the requesting index can use our views.

        Raises:
            PeerError: The index is incompatible or is this process; `reason` says which.
        """
        if request.schema != SCHEMA:
            raise PeerError("schema", f"schema: expected {SCHEMA}, got {request.schema}")
        self.admit_key(request.instance, request.fingerprint)
        if request.form != FORM:
            raise PeerError("backend", f"form: expected {FORM!r}, got {request.form[:100]!r}")
        if tuple(request.tiers) != self.tiers:
            raise PeerError("tiers", f"tiers: expected {', '.join(self.tiers)}; set the same tier flags")

    def admit_key(self, instance: str, fingerprint: int) -> None:
        """Check that another process knows the seed.

        Raises:
            PeerError: The fingerprint differs, or the process is this one; `reason` says which.
        """
        if instance == self.instance:
            raise PeerError("self", "the peer is this process")
        if fingerprint != self.fingerprint:
            raise PeerError("fingerprint", "--hash-seed and --block-tokens must be the same as here")


@dataclass(eq=False)
class PeerService(pb_grpc.IndexPeerServicer):
    """gRPC service that sends views to peers. Thread-safe."""

    identity: PeerIdentity
    # Starts the export of an engine's view, by `PodStream.holder` and model.
    export: Callable[[str, str], Future[ViewSnapshot]]
    metrics: IndexerMetrics
    total_s: float  # timeout of an export

    def __post_init__(self) -> None:
        self._free = threading.Semaphore(_AT_ONCE)

    def add_to(self, server: grpc.Server) -> None:
        pb_grpc.add_IndexPeerServicer_to_server(self, server)

    def Snapshot(
        self, request: pb.SnapshotRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.SnapshotChunk]:
        """Stream the view of one engine, in the format of `messages`."""
        started_s, outcome = time.monotonic(), "given_up"
        try:
            self.identity.admit(request)
            if not self._free.acquire(blocking=False):
                raise PeerError("busy", f"{_AT_ONCE} exports are running")
            try:
                for message in snapshot_messages(self._listed(request.engine, request.model)):
                    self.metrics.export_bytes.inc(len(message))
                    yield pb.SnapshotChunk(message=message)
            finally:
                self._free.release()
            outcome = "completed"
            self.metrics.export_s.observe(time.monotonic() - started_s)
        except PeerError as error:
            outcome = error.reason
            _log.info("peer request rejected: engine=%s error=%s", request.engine, error)
            context.abort(_CODES.get(error.reason, grpc.StatusCode.FAILED_PRECONDITION), str(error))
        finally:
            self.metrics.exports.labels(outcome).inc()

    def _listed(self, engine: str, model: str) -> ViewSnapshot:
        view = self.export(engine, model)
        try:
            return view.result(self.total_s)
        except FutureTimeoutError:
            view.cancel()
            raise PeerError("timeout", f"the export took more than {self.total_s:g} s") from None


class PeerClient:
    """Client that fetches views from peers; skips recently unreachable ones. Thread-safe.

    Raises:
        ConfigError: A TLS file cannot be read.
    """

    def __init__(self, config: IndexerConfig, identity: PeerIdentity, metrics: IndexerMetrics) -> None:
        self._config = config
        self._identity = identity
        self._metrics = metrics
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._channels: set[grpc.Channel] = set()
        self._down_until_s: dict[str, float] = {}
        credentials(config)

    def ask(self, stream: PodStream) -> tuple[ViewSnapshot | None, int]:
        """Ask the peers in random order; return the first view and its size in bytes, or (None, 0)."""
        ends_s = time.monotonic() + self._config.snapshot_total_s
        for host, address in self._addresses():
            while not self._closing.is_set() and time.monotonic() < ends_s:
                try:
                    snapshot, size_bytes = self._snapshot(host, address, stream, ends_s)
                except PeerError as error:
                    self._failed(stream, address, error)
                    if error.reason != "busy" or self._closing.wait(_BUSY_S):
                        break
                else:
                    self._metrics.peers_asked.labels("completed").inc()
                    return snapshot, size_bytes
        return None, 0

    def close(self) -> None:
        self._closing.set()
        with self._lock:
            channels = tuple(self._channels)
        for channel in channels:
            channel.close()

    def _addresses(self) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        for peer in self._config.peers:
            if self._is_down(peer):
                continue
            try:
                found += resolve(peer)
            except OSError as error:
                self._metrics.peers_asked.labels("unknown_host").inc()
                _log.info("peer name not resolved: peer=%s error=%s", peer, error)
                self._set_down(peer)
        # Shuffled, so that processes that start together do not ask the same peer.
        random.shuffle(found)
        return [each for each in dict.fromkeys(found[:_ADDRESSES_MAX]) if not self._is_down(each[1])]

    def _snapshot(
        self, host: str, address: str, stream: PodStream, ends_s: float
    ) -> tuple[ViewSnapshot, int]:
        request = self._identity.request(stream.holder, stream.model)
        channel = self._channel(host, address)
        try:
            call = pb_grpc.IndexPeerStub(channel).Snapshot(
                request, timeout=max(0.0, ends_s - time.monotonic())
            )
            messages = (chunk.message for chunk in call)
            return read_messages(messages, self._config, len(self._identity.tiers))
        except grpc.RpcError as error:
            raise self._refusal(address, error) from None
        except ValueError as error:
            # `close` closed the channel during the call.
            raise PeerError("unreachable", str(error)) from None
        finally:
            with self._lock:
                self._channels.discard(channel)
            channel.close()

    def _refusal(self, address: str, error: grpc.RpcError) -> PeerError:
        code, details = error.code(), str(error.details())
        if code is grpc.StatusCode.UNAVAILABLE:
            self._set_down(address)
            return PeerError("unreachable", details)
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return PeerError("timeout", details)
        reason, _, message = details.partition(": ")
        return PeerError(reason, message) if reason in _REASONS else PeerError("refused", details)

    def _is_down(self, name: str) -> bool:
        return self._down_until_s.get(name, 0.0) > time.monotonic()

    def _set_down(self, name: str) -> None:
        now_s = time.monotonic()
        still = {other: until_s for other, until_s in self._down_until_s.items() if until_s > now_s}
        self._down_until_s = {**still, name: now_s + DOWN_S}

    def _failed(self, stream: PodStream, address: str, error: PeerError) -> None:
        self._metrics.peers_asked.labels(error.reason).inc()
        level = logging.INFO if error.reason in _USUAL else logging.WARNING
        _log.log(level, "peer snapshot unavailable: pod=%s peer=%s error=%s", stream.holder, address, error)

    def _channel(self, host: str, address: str) -> grpc.Channel:
        with self._lock:
            if self._closing.is_set():
                raise PeerError("unreachable", "this process is shutting down")
            channel = open_channel(self._config, host, address, MESSAGE_BYTES_MAX + _OVERHEAD_BYTES)
            self._channels.add(channel)
        return channel


def resolve(peer: str) -> list[tuple[str, str]]:
    """Resolve a peer's HOST:PORT; return its (host, "ip:port") pairs without duplicates.

    Raises:
        OSError: The name cannot be resolved.
    """
    host, _, port = peer.rpartition(":")
    host = host.strip("[]")
    found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    addresses = dict.fromkeys(str(address[0]) for *_, address in found)
    return [(host, f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}") for ip in addresses]


def credentials(config: IndexerConfig) -> grpc.ChannelCredentials | None:
    """Return the TLS credentials of connections to peers; None: no TLS.

    Raises:
        ConfigError: A TLS file cannot be read.
    """
    if config.peer_ca is None:
        return None
    try:
        shown = [path.read_bytes() for path in (config.peer_key, config.peer_cert) if path is not None]
        return grpc.ssl_channel_credentials(config.peer_ca.read_bytes(), *shown)
    except OSError as error:
        raise ConfigError(
            f"--peer-ca, --peer-cert, --peer-key: TLS: {error.filename}: cannot be read: {error.strerror}"
        ) from error


def open_channel(config: IndexerConfig, host: str, address: str, receive_bytes_max: int) -> grpc.Channel:
    """Open an unshared channel to one address, which the caller must close.

    Args:
        host: Name of the peer, checked against its certificate.

    Raises:
        PeerError: "credentials": a TLS file cannot be read.
    """
    options = [
        ("grpc.max_receive_message_length", receive_bytes_max),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.min_reconnect_backoff_ms", _CONNECT_MS),
    ]
    try:
        shown = credentials(config)
    except ConfigError as error:
        raise PeerError("credentials", str(error)) from None
    if shown is None:
        return grpc.insecure_channel(address, options)
    # The certificate is for the host name, not for the IP address.
    return grpc.secure_channel(address, shown, [*options, ("grpc.ssl_target_name_override", host)])
