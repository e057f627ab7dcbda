"""kvroute.v1.IndexPeer: tells peers our view of an engine, and asks them for theirs.

Requests of peers come in on a gRPC server's threads; the view is listed on the subscriber's thread meanwhile.
Peers are asked by the workers that fetch snapshots; whatever they send is checked by `peer_wire`, and given
up after a time in all.
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
from typing import Any

import grpc

from indexer._pb import indexer_pb2 as pb
from indexer._pb import indexer_pb2_grpc as pb_grpc
from indexer.config import IndexerConfig, PodStream
from indexer.errors import ConfigError, PeerError
from indexer.metrics import IndexerMetrics
from indexer.peers.messages import FORM, MESSAGE_BYTES_MAX, SCHEMA, SnapshotReader, snapshot_messages
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
# A peer that could not be reached is not asked again for so long: there are many engines to ask for.
DOWN_S = 5.0
_ADDRESSES_MAX = 64
# A peer that has too many askers is asked again after this.
_BUSY_S = 0.25
# Labels that a peer's refusal may bring into our metrics.
_REASONS = frozenset(
    {
        *("self", "schema", "fingerprint", "backend", "tiers", "not_followed"),
        *("stale", "recovering", "unproven", "orphans", "part_runs"),
        *("busy", "too_large", "changed", "timeout", "internal_error"),
    }
)
# Nothing to wonder about: it is us, or it is no better off.
_USUAL = frozenset({"self", "recovering", "unproven", "unreachable"})


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """One index, as its peers see it: what two must have in common to go on from each other's views.

    Keys mean the same only under the same seed and block length. The fingerprint shows that both know the
    seed, without telling it: whoever does not know it is told nothing.
    """

    fingerprint: int  # see `BlockHasher.fingerprint`
    tiers: tuple[str, ...]  # their names, best first; a tier's number is its place
    instance: str = field(default_factory=lambda: secrets.token_hex(16))  # another for each process

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
        """Check that another index can use our views.

        Raises:
            PeerError: It cannot, or is ourselves; carries the reason.
        """
        if request.schema != SCHEMA:
            raise PeerError("schema", f"snapshots of version {SCHEMA} are told, not {request.schema}")
        self.admit_key(request.instance, request.fingerprint)
        if request.form != FORM:
            raise PeerError("backend", f"views have the form {FORM!r} here")
        if tuple(request.tiers) != self.tiers:
            raise PeerError("tiers", f"tiers must be {', '.join(self.tiers)}, as here")

    def admit_key(self, instance: str, fingerprint: int) -> None:
        """Check that another process knows the seed.

        Raises:
            PeerError: It does not, or is ourselves; carries the reason.
        """
        if instance == self.instance:
            raise PeerError("self", "that is the same process")
        if fingerprint != self.fingerprint:
            raise PeerError("fingerprint", "--hash-seed and --block-tokens must be the same as here")


class PeerService(pb_grpc.IndexPeerServicer):
    """Tells views to peers. Thread-safe."""

    def __init__(
        self,
        identity: PeerIdentity,
        export: Callable[[str, str], Future[ViewSnapshot]],
        metrics: IndexerMetrics,
        *,
        total_s: float,
    ) -> None:
        self.identity = identity
        self._export = export  # lists the view of an engine, by its name in the index and its model
        self._metrics = metrics
        self._total_s = total_s  # longest time that a view may take to be listed
        self._free = threading.Semaphore(_AT_ONCE)

    def add_to(self, server: grpc.Server) -> None:
        # The generated function has no types.
        add: Any = pb_grpc.add_IndexPeerServicer_to_server
        add(self, server)

    def Snapshot(  # noqa: N802 (the name is the proto's)
        self, request: pb.SnapshotRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.SnapshotChunk]:
        """Tells all that the view of one engine holds, in the messages of `peer_wire`."""
        started_s, outcome = time.monotonic(), "given_up"
        try:
            self.identity.admit(request)
            if not self._free.acquire(blocking=False):
                raise PeerError("busy", f"{_AT_ONCE} views are being told already")
            try:
                for message in snapshot_messages(self._listed(request.engine, request.model)):
                    self._metrics.export_bytes.inc(len(message))
                    yield pb.SnapshotChunk(message=message)
            finally:
                self._free.release()
            outcome = "completed"
            self._metrics.export_s.observe(time.monotonic() - started_s)
        except PeerError as error:
            outcome = error.reason
            _log.info("view of %s not told to a peer: %s", request.engine, error)
            context.abort(_CODES.get(error.reason, grpc.StatusCode.FAILED_PRECONDITION), str(error))
        finally:
            self._metrics.exports.labels(outcome).inc()

    def _listed(self, engine: str, model: str) -> ViewSnapshot:
        told = self._export(engine, model)
        try:
            return told.result(self._total_s)
        except FutureTimeoutError:
            told.cancel()
            raise PeerError("timeout", f"the view was not listed in {self._total_s:g} s") from None


class PeerClient:
    """Knows the peers, and which of them could not be reached lately. Thread-safe.

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
        """Asks one peer after another until one has told; tells the bytes of its messages, too."""
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
                _log.info("peer %s: its name is not known: %s", peer, error)
                self._set_down(peer)
        # So that not all who start at once ask the same one.
        random.shuffle(found)
        return [each for each in dict.fromkeys(found[:_ADDRESSES_MAX]) if not self._is_down(each[1])]

    def _snapshot(
        self, host: str, address: str, stream: PodStream, ends_s: float
    ) -> tuple[ViewSnapshot, int]:
        reader = SnapshotReader(self._config, len(self._identity.tiers))
        request = self._identity.request(stream.holder, stream.model)
        # The generated class has no types.
        stub: Any = pb_grpc.IndexPeerStub
        channel = self._channel(host, address)
        try:
            call = stub(channel).Snapshot(request, timeout=max(0.0, ends_s - time.monotonic()))
            return reader.read(chunk.message for chunk in call), reader.size_bytes
        except grpc.RpcError as error:
            raise self._refusal(address, error) from None
        except ValueError as error:
            # The channel was closed under it.
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
        _log.log(level, "no snapshot of %s from peer %s: %s", stream.holder, address, error)

    def _channel(self, host: str, address: str) -> grpc.Channel:
        with self._lock:
            if self._closing.is_set():
                raise PeerError("unreachable", "we are about to end")
            channel = open_channel(self._config, host, address, MESSAGE_BYTES_MAX + _OVERHEAD_BYTES)
            self._channels.add(channel)
        return channel


def resolve(peer: str) -> list[tuple[str, str]]:
    """Host and address of all that a peer's name stands for, each once.

    Args:
        peer: HOST:PORT.

    Raises:
        OSError: Nobody has that name.
    """
    host, _, port = peer.rpartition(":")
    host = host.strip("[]")
    found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    addresses = dict.fromkeys(str(address[0]) for *_, address in found)
    return [(host, f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}") for ip in addresses]


def credentials(config: IndexerConfig) -> grpc.ChannelCredentials | None:
    """Credentials that peers are shown, and held against; None: no TLS.

    Raises:
        ConfigError: A file cannot be read.
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
    """Make a channel of its own to one address; the caller closes it.

    Args:
        host: The peer's name, which its certificate must be for.

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
    # The certificate is the name's, not the address's.
    return grpc.secure_channel(address, shown, [*options, ("grpc.ssl_target_name_override", host)])
