"""Follows the other routers of the fleet: names in; what each tells goes to a callback, as does its loss.

One thread looks names up and watches over silence, one more for each router that is followed. A router that
goes away, or falls silent, is lost at once with all that it told; it is asked again until nobody names it.
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
from router.feedback.change_log import HEARTBEAT_S
from router.feedback.messages import FOLLOW, MESSAGE_BYTES_MAX, FollowRequest, News, read_news

_log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
SILENCE_MAX_S = 3 * HEARTBEAT_S
_FOLLOWED_MAX = 64
# Until one that was lost is asked again, at first and at most; one that refuses will hardly change its mind.
AGAIN_S, AGAIN_MAX_S, REFUSED_AGAIN_S = 0.2, 2.0, 10.0
# Room for another version's messages, and for a single item that is larger.
_RECEIVE_BYTES_MAX = 2 * MESSAGE_BYTES_MAX + 4096

CONNECTING, FOLLOWED, LOST = "connecting", "followed", "lost"
REFUSED, NO_LEDGER, SELF = "refused", "no_ledger", "self"
STATES = (CONNECTING, FOLLOWED, LOST, REFUSED, NO_LEDGER, SELF)
# By the reason of an error; all others are refusals.
_STATE_OF = {"lost": LOST, "gone": LOST, NO_LEDGER: NO_LEDGER, SELF: SELF}


@dataclass(eq=False)
class Followers:
    """Follows every address that the peers' names have, but our own."""

    config: IndexerConfig  # the peers and their TLS
    identity: PeerIdentity  # who we are
    take: Callable[[str, News, float], None]  # (address, news, now_s), one at a time for each address
    lose: Callable[[str, float], int]  # (address, now_s): it tells nothing more; returns its requests
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        identity = self.identity
        self.request = msgspec.msgpack.encode(FollowRequest(identity.instance, identity.fingerprint))
        self.closing = threading.Event()
        self._lock = threading.Lock()
        self._followers: dict[str, Peer] = {}
        self.unknown_names: frozenset[str] = frozenset()  # peers whose names have no address
        self._looker = threading.Thread(target=self._look_on, name="ledger-peers", daemon=True)

    @property
    def peers(self) -> list[Peer]:
        with self._lock:
            return list(self._followers.values())

    def start(self) -> None:
        self._looker.start()

    def close(self) -> None:
        self.closing.set()
        if self._looker.is_alive():
            self._looker.join()
        peers = self.peers
        for peer in peers:
            peer.end()
        for peer in peers:
            peer.thread.join()

    def _look_on(self) -> None:
        while not self.closing.is_set():
            try:
                self._look()
            except Exception:
                _log.exception("looking for routers failed; it goes on")
            self.closing.wait(LOOK_EVERY_S)

    def _look(self) -> None:
        named = dict(self._named())
        now_s = self.clock()
        for address, follower in list(self._followers.items()):
            follower.watch(now_s)
            follower.is_named = address in named
            if not follower.thread.is_alive():
                with self._lock:
                    del self._followers[address]
        for address, host in named.items():
            if address not in self._followers and len(self._followers) < _FOLLOWED_MAX:
                follower = Peer(host, address, self)
                with self._lock:
                    self._followers[address] = follower
                follower.thread.start()

    def _named(self) -> Iterator[tuple[str, str]]:
        unknown = set()
        for peer in self.config.peers:
            try:
                for host, address in resolve(peer):
                    yield address, host
            except OSError as error:
                unknown.add(peer)
                if peer not in self.unknown_names:
                    _log.warning("peer %s: its name is not known: %s", peer, error)
        self.unknown_names = frozenset(unknown)


class Peer:
    """One router, followed for as long as its address is named, or it tells something."""

    def __init__(self, host: str, address: str, owner: Followers) -> None:
        self.address = address
        # "followed"; "lost" or "connecting", until it answers (again); "refused", it does not tell us;
        # "no_ledger", it has nothing to tell; "self", it is we.
        self.state = CONNECTING
        self.why = "not asked yet"  # why it is not followed
        self.heard_s: float | None = None  # when it last told anything
        self.is_named = True
        self._host = host
        self._owner = owner
        self._call: Any = None
        self._asked_s = 0.0
        self._silent = False
        self.thread = threading.Thread(target=self._run, name="ledger-peer", daemon=True)

    def watch(self, now_s: float) -> None:
        """End the call to one that has fallen silent, or never says anything."""
        call = self._call
        if call is not None and now_s - max(self._asked_s, self.heard_s or 0.0) > SILENCE_MAX_S:
            self._silent = True
            call.cancel()

    def end(self) -> None:
        """Have the thread end soon; the event that says so is set."""
        if (call := self._call) is not None:
            call.cancel()

    def _run(self) -> None:
        again_s = AGAIN_S
        while self.is_named and not self._owner.closing.is_set():
            self._silent = False
            try:
                self._follow()
                error = PeerError("gone", "it has ended the call")
            except PeerError as refusal:
                error = refusal
            except Exception as failure:
                _log.exception("following the router %s failed", self.address)
                error = PeerError("internal_error", str(failure))
            again_s = self._lost(error, again_s)
            if self._owner.closing.wait(again_s):
                return

    def _lost(self, error: PeerError, again_s: float) -> float:
        """Record why it is not followed; return after how many seconds it is asked again."""
        requests = self._owner.lose(self.address, self._owner.clock())
        if self._owner.closing.is_set():
            return 0.0
        was_followed, old_why = self.state == FOLLOWED, self.why
        self.state, self.why = _STATE_OF.get(error.reason, REFUSED), str(error)
        if was_followed:
            _log.warning(
                "the router %s is lost (%s): its %d requests in flight count no longer",
                *(self.address, error, requests),
            )
        elif self.state == REFUSED and old_why != self.why:
            _log.warning("the router %s does not tell of its requests: %s", self.address, error)
        if self.state != LOST:
            return REFUSED_AGAIN_S
        return AGAIN_S if was_followed else min(2 * again_s, AGAIN_MAX_S)

    def _follow(self) -> None:
        """Take what it tells until it ends.

        Raises:
            PeerError: It does not tell, or not any more; carries the reason.
        """
        owner = self._owner
        channel = open_channel(owner.config, self._host, self.address, _RECEIVE_BYTES_MAX)
        try:
            self._asked_s = owner.clock()
            # Bytes in and bytes out, which its types do not know.
            follow: Any = channel.unary_stream(FOLLOW)
            self._call = follow(owner.request)
            for message in self._call:
                self.heard_s = now_s = owner.clock()
                if self.state != FOLLOWED:
                    _log.info("the router %s tells of its requests", self.address)
                    self.state, self.why = FOLLOWED, ""
                owner.take(self.address, read_news(message), now_s)
        except grpc.RpcError as error:
            raise self._refusal(error) from None
        finally:
            self._call = None
            channel.close()

    def _refusal(self, error: Any) -> PeerError:
        code, details = error.code(), str(error.details())
        if code is grpc.StatusCode.CANCELLED and self._silent:
            return PeerError(LOST, f"it was silent for {SILENCE_MAX_S:g} s")
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            return PeerError(LOST, details)
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return PeerError(NO_LEDGER, "it is an indexer, or an older router")
        reason, _, message = details.partition(": ")
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return PeerError(LOST, message or details)
        return PeerError(SELF if reason == SELF else REFUSED, message or details)
