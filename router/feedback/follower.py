"""Client side of shared ledgers: follows other routers, and passes on their changes and their loss.

One thread resolves the peers' names and detects silence; one thread per peer receives its changes. A peer
that disconnects or falls silent is lost with all its requests, and retried while its name resolves to it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import msgspec

from indexer.config import IndexerConfig
from indexer.errors import PeerError
from indexer.peers import PeerIdentity, open_channel, resolve
from router.feedback.change_log import (
    FOLLOW,
    HEARTBEAT_S,
    MESSAGE_BYTES_MAX,
    FollowRequest,
    LedgerChanges,
    decode_changes,
)

_log = logging.getLogger(__name__)

RESOLVE_EVERY_S = 1.0
SILENCE_MAX_S = 3 * HEARTBEAT_S
_PEERS_MAX = 64
# Backoff in seconds after a loss: at first and at most. A rejection lasts until a configuration changes.
RETRY_S, RETRY_MAX_S, REFUSED_RETRY_S = 0.2, 2.0, 10.0
# Room for larger messages of other versions, and for a single item above the limit.
_RECEIVE_BYTES_MAX = 2 * MESSAGE_BYTES_MAX + 4096

CONNECTING, FOLLOWED, LOST = "connecting", "followed", "lost"
REFUSED, NO_LEDGER, SELF = "refused", "no_ledger", "self"
STATES = (CONNECTING, FOLLOWED, LOST, REFUSED, NO_LEDGER, SELF)
# State by an error's reason; any other reason is a rejection.
_STATE_OF = {"lost": LOST, "gone": LOST, NO_LEDGER: NO_LEDGER, SELF: SELF}


@dataclass(eq=False)
class LedgerFollower:
    """Follower of all peers: one thread per address of their names, except this router's own."""

    config: IndexerConfig  # peers and their TLS settings
    identity: PeerIdentity  # of this router
    # Called as (address, changes, now_s), one call at a time per address.
    on_changes: Callable[[str, LedgerChanges, float], None]
    on_lost: Callable[[str, float], int]  # called as (address, now_s); returns the peer's requests in flight
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        identity = self.identity
        self.request = msgspec.msgpack.encode(FollowRequest(identity.instance, identity.fingerprint))
        self.closing = threading.Event()
        self._lock = threading.Lock()
        self._peers: dict[str, FollowedPeer] = {}
        self.unknown_names: frozenset[str] = frozenset()  # peers whose names do not resolve
        self._resolver = threading.Thread(target=self._run, name="ledger-peers", daemon=True)

    @property
    def peers(self) -> list[FollowedPeer]:
        with self._lock:
            return list(self._peers.values())

    def start(self) -> None:
        self._resolver.start()

    def close(self) -> None:
        self.closing.set()
        if self._resolver.is_alive():
            self._resolver.join()
        peers = self.peers
        for peer in peers:
            peer.cancel()
        for peer in peers:
            peer.thread.join()

    def _run(self) -> None:
        while not self.closing.is_set():
            try:
                self._update_peers()
            except Exception:
                _log.exception("peer resolution failed, retrying: interval_s=%g", RESOLVE_EVERY_S)
            self.closing.wait(RESOLVE_EVERY_S)

    def _update_peers(self) -> None:
        resolved = dict(self._resolved())
        now_s = self.clock()
        for address, peer in list(self._peers.items()):
            peer.check_silence(now_s)
            peer.is_resolved = address in resolved
            if not peer.thread.is_alive():
                with self._lock:
                    del self._peers[address]
        for address, host in resolved.items():
            if address not in self._peers and len(self._peers) < _PEERS_MAX:
                peer = FollowedPeer(host, address, self)
                with self._lock:
                    self._peers[address] = peer
                peer.thread.start()

    def _resolved(self) -> Iterator[tuple[str, str]]:
        unknown = set()
        for peer in self.config.peers:
            try:
                for host, address in resolve(peer):
                    yield address, host
            except OSError as error:
                unknown.add(peer)
                if peer not in self.unknown_names:
                    _log.warning("peer name does not resolve, retrying: peer=%s error=%s", peer, error)
        self.unknown_names = frozenset(unknown)


class FollowedPeer:
    """Peer and the thread that follows it while its address resolves or it sends messages."""

    def __init__(self, host: str, address: str, owner: LedgerFollower) -> None:
        self.address = address
        # "followed"; "connecting" or "lost" until it answers (again); "refused": it rejects this router;
        # "no_ledger": it has no ledger service; "self": it is this router.
        self.state = CONNECTING
        self.why = "not connected yet"  # reason of any other state than "followed"
        self.received_s: float | None = None  # time of the latest message
        self.is_resolved = True
        self._host = host
        self._owner = owner
        self._call: Any = None
        self._called_s = 0.0
        self._silent = False
        self.thread = threading.Thread(target=self._run, name="ledger-peer", daemon=True)

    def check_silence(self, now_s: float) -> None:
        """Cancel the call if the peer has sent nothing for `SILENCE_MAX_S` seconds."""
        call = self._call
        if call is not None and now_s - max(self._called_s, self.received_s or 0.0) > SILENCE_MAX_S:
            self._silent = True
            call.cancel()

    def cancel(self) -> None:
        """Cancel the call, so that the thread ends soon; `LedgerFollower.closing` must be set before."""
        if (call := self._call) is not None:
            call.cancel()

    def _run(self) -> None:
        retry_s = RETRY_S
        while self.is_resolved and not self._owner.closing.is_set():
            self._silent = False
            try:
                self._follow()
                error = PeerError("gone", "the peer ended the call")
            except PeerError as refusal:
                error = refusal
            except Exception as failure:
                _log.exception("peer connection failed: peer=%s", self.address)
                error = PeerError("internal_error", str(failure))
            retry_s = self._disconnected(error, retry_s)
            if self._owner.closing.wait(retry_s):
                return

    def _disconnected(self, error: PeerError, retry_s: float) -> float:
        """Record why the peer is not followed; return the seconds until the next attempt."""
        requests = self._owner.on_lost(self.address, self._owner.clock())
        if self._owner.closing.is_set():
            return 0.0
        was_followed, old_why = self.state == FOLLOWED, self.why
        self.state, self.why = _STATE_OF.get(error.reason, REFUSED), str(error)
        if was_followed:
            _log.warning(
                "peer lost, its requests no longer count: peer=%s requests=%d error=%s",
                *(self.address, requests, error),
            )
        elif self.state == REFUSED and old_why != self.why:
            _log.warning("peer load unavailable, routing without it: peer=%s error=%s", self.address, error)
        if self.state != LOST:
            return REFUSED_RETRY_S
        return RETRY_S if was_followed else min(2 * retry_s, RETRY_MAX_S)

    def _follow(self) -> None:
        """Receive the peer's changes until it ends the call; raises PeerError if the call fails."""
        owner = self._owner
        channel = open_channel(owner.config, self._host, self.address, _RECEIVE_BYTES_MAX)
        try:
            self._called_s = owner.clock()
            # Without serialisers requests and messages are bytes, which the stubs do not express.
            follow: Any = channel.unary_stream(FOLLOW)
            self._call = follow(owner.request)
            for message in self._call:
                self.received_s = now_s = owner.clock()
                if self.state != FOLLOWED:
                    _log.info("peer followed: peer=%s", self.address)
                    self.state, self.why = FOLLOWED, ""
                owner.on_changes(self.address, decode_changes(message), now_s)
        except grpc.RpcError as error:
            raise self._peer_error(error) from None
        finally:
            self._call = None
            channel.close()

    def _peer_error(self, error: Any) -> PeerError:
        code, details = error.code(), str(error.details())
        if code is grpc.StatusCode.CANCELLED and self._silent:
            return PeerError(LOST, f"the peer was silent for {SILENCE_MAX_S:g} s")
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            return PeerError(LOST, details)
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return PeerError(NO_LEDGER, "the peer is an indexer, or an older router")
        reason, _, message = details.partition(": ")
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return PeerError(LOST, message or details)
        return PeerError(SELF if reason == SELF else REFUSED, message or details)
