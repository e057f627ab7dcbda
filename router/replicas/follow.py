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

from indexer.config import IndexerConfig
from indexer.errors import ConfigError, PeerError
from indexer.peer_service import PeerIdentity, open_channel, resolve
from router.replicas.journal import HEARTBEAT_S
from router.replicas.news import FOLLOW, MESSAGE_BYTES_MAX, FollowRequest, News, read_news, write_request

_log = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
_SILENCE_MAX_S = 3 * HEARTBEAT_S
_FOLLOWED_MAX = 64
# Until one that was lost is asked again, at first and at most; one that refuses will hardly change its mind.
_AGAIN_S, _AGAIN_MAX_S, _REFUSED_AGAIN_S = 0.2, 2.0, 10.0
# Room for another version's messages, and for a single item that is larger.
_RECEIVE_BYTES_MAX = 2 * MESSAGE_BYTES_MAX + 4096

CONNECTING, FOLLOWED, LOST = "connecting", "followed", "lost"
REFUSED, NO_LEDGER, SELF = "refused", "no_ledger", "self"
STATES = (CONNECTING, FOLLOWED, LOST, REFUSED, NO_LEDGER, SELF)
# By the reason of an error; all others are refusals.
_STATE_OF = {"lost": LOST, "gone": LOST, NO_LEDGER: NO_LEDGER, SELF: SELF}


@dataclass(frozen=True, slots=True)
class PeerState:
    """One router, as this one sees it.

    Attributes:
        state: "followed"; "lost" or "connecting", until it answers (again); "refused", it does not tell us;
            "no_ledger", it has nothing to tell; "self", it is we.
    """

    address: str
    state: str
    why: str  # why it is not followed
    heard_s: float | None  # when it last told anything; None: never


class Followers:
    """Follows every address that the peers' names have, but our own.

    Args:
        config: The peers and their TLS.
        identity: Who we are.
        take: Called with (address, news, now_s), one at a time for each address.
        lose: Called with (address, now_s): nothing is known of it any more; tells its number of requests.
        clock: A monotonic clock.

    Attributes:
        unknown_names: Peers whose names have no address.
    """

    def __init__(
        self,
        config: IndexerConfig,
        identity: PeerIdentity,
        take: Callable[[str, News, float], None],
        lose: Callable[[str, float], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.request = write_request(FollowRequest(identity.instance, identity.fingerprint))
        self.take = take
        self.lose = lose
        self.clock = clock
        self.closing = threading.Event()
        self._lock = threading.Lock()
        self._followers: dict[str, _Follower] = {}
        self.unknown_names: frozenset[str] = frozenset()
        self._looker = threading.Thread(target=self._look_on, name="ledger-peers", daemon=True)

    @property
    def states(self) -> list[PeerState]:
        with self._lock:
            return [follower.state for follower in self._followers.values()]

    def start(self) -> None:
        self._looker.start()

    def close(self) -> None:
        self.closing.set()
        if self._looker.is_alive():
            self._looker.join()
        with self._lock:
            followers = list(self._followers.values())
        for follower in followers:
            follower.end()
        for follower in followers:
            follower.thread.join()

    def _look_on(self) -> None:
        while not self.closing.is_set():
            try:
                self._look()
            except Exception:
                _log.exception("looking for routers failed; it goes on")
            self.closing.wait(_LOOK_EVERY_S)

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
                follower = _Follower(host, address, self)
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


class _Follower:
    """Follows one address for as long as it is named, or tells something."""

    def __init__(self, host: str, address: str, owner: Followers) -> None:
        self._host = host
        self._address = address
        self._owner = owner
        self._call: Any = None
        self._asked_s = 0.0
        self._silent = False
        self.is_named = True
        self.state = PeerState(address, CONNECTING, "not asked yet", None)
        self.thread = threading.Thread(target=self._run, name="ledger-peer", daemon=True)

    def watch(self, now_s: float) -> None:
        """Gives up one that has fallen silent, or never says anything."""
        call = self._call
        if call is not None and now_s - max(self._asked_s, self.state.heard_s or 0.0) > _SILENCE_MAX_S:
            self._silent = True
            call.cancel()

    def end(self) -> None:
        """Has the thread end soon; the event that says so is set."""
        if (call := self._call) is not None:
            call.cancel()

    def _run(self) -> None:
        again_s = _AGAIN_S
        while self.is_named and not self._owner.closing.is_set():
            self._silent = False
            try:
                self._follow()
                error = PeerError("gone", "it has ended the call")
            except PeerError as refusal:
                error = refusal
            except Exception as failure:
                _log.exception("following the router %s failed", self._address)
                error = PeerError("internal_error", str(failure))
            again_s = self._lost(error, again_s)
            if self._owner.closing.wait(again_s):
                return

    def _lost(self, error: PeerError, again_s: float) -> float:
        """Takes note; tells when to ask again."""
        before = self.state
        requests = self._owner.lose(self._address, self._owner.clock())
        if self._owner.closing.is_set():
            return 0.0
        state = _STATE_OF.get(error.reason, REFUSED)
        self.state = PeerState(self._address, state, str(error), before.heard_s)
        if before.state == FOLLOWED:
            _log.warning(
                "the router %s is lost (%s): its %d requests in flight count no longer",
                *(self._address, error, requests),
            )
        elif state == REFUSED and before.why != str(error):
            _log.warning("the router %s does not tell of its requests: %s", self._address, error)
        if state != LOST:
            return _REFUSED_AGAIN_S
        return _AGAIN_S if before.state == FOLLOWED else min(2 * again_s, _AGAIN_MAX_S)

    def _follow(self) -> None:
        """Takes what it tells until it ends.

        Raises:
            PeerError: It does not tell, or not any more; carries the reason.
        """
        try:
            channel = open_channel(
                self._owner.config, self._host, self._address, receive_bytes_max=_RECEIVE_BYTES_MAX
            )
        except ConfigError as error:
            raise PeerError("credentials", str(error)) from None
        try:
            self._asked_s = self._owner.clock()
            # Bytes in and bytes out, which its types do not know.
            follow: Any = channel.unary_stream(FOLLOW)
            self._call = follow(self._owner.request)
            for message in self._call:
                now_s = self._owner.clock()
                self._heard(now_s)
                self._owner.take(self._address, read_news(message), now_s)
        except grpc.RpcError as error:
            raise self._refusal(error) from None
        finally:
            self._call = None
            channel.close()

    def _heard(self, now_s: float) -> None:
        if self.state.state != FOLLOWED:
            _log.info("the router %s tells of its requests", self._address)
        self.state = PeerState(self._address, FOLLOWED, "", now_s)

    def _refusal(self, error: Any) -> PeerError:
        code, details = error.code(), str(error.details())
        if code is grpc.StatusCode.CANCELLED and self._silent:
            return PeerError(LOST, f"it was silent for {_SILENCE_MAX_S:g} s")
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            return PeerError(LOST, details)
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return PeerError(NO_LEDGER, "it is an indexer, or an older router")
        reason, _, message = details.partition(": ")
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return PeerError(LOST, message or details)
        return PeerError(SELF if reason == SELF else REFUSED, message or details)
