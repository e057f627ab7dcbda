"""Tests of shared ledgers over gRPC: peers that send, disconnect, fall silent, reject or send bad data."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import msgspec
import pytest

from indexer.config import IndexerConfig
from indexer.peers.service import PeerIdentity
from router.feedback import follower
from router.feedback.change_log import (
    FOLLOW,
    LEDGER_SERVICE,
    ChangeLog,
    FollowRequest,
    LedgerChanges,
    LedgerService,
    Sent,
    encode_changes,
)
from router.feedback.follower import FollowedPeer, LedgerFollower
from tests.support.indexer.engine_publisher import wait_until
from tests.support.loopback import HERE, free_port
from tests.unit.router.feedback.test_replicas import KEYS, ONE, Sender

SEED = 7
OURS = PeerIdentity(fingerprint=SEED, tiers=("gpu",))
OTHER = FollowRequest("other", SEED)
Answer = Callable[[bytes, grpc.ServicerContext], Iterator[bytes]]


@pytest.fixture(autouse=True)
def _short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the follower's timeouts to tenths of a second."""
    monkeypatch.setattr(follower, "RESOLVE_EVERY_S", 0.05)
    monkeypatch.setattr(follower, "SILENCE_MAX_S", 2.0)
    monkeypatch.setattr(follower, "REFUSED_RETRY_S", 0.2)
    monkeypatch.setattr(follower, "RETRY_S", 0.05)
    monkeypatch.setattr(follower, "RETRY_MAX_S", 0.1)


class Recorder:
    """Follower that records the changes it receives and the peers it loses."""

    def __init__(self, *peers: str) -> None:
        self.received: list[LedgerChanges] = []
        self.lost: list[str] = []
        config = IndexerConfig(hash_seed=SEED, peers=peers)
        self.follower = LedgerFollower(config, OURS, self._on_changes, self._on_lost)

    def _on_changes(self, _address: str, changes: LedgerChanges, _now_s: float) -> None:
        self.received.append(changes)

    def _on_lost(self, address: str, _now_s: float) -> int:
        self.lost.append(address)
        return 0

    @property
    def numbers(self) -> list[int]:
        """Return the numbers of the requests received."""
        return [sent.number for changes in self.received for sent in changes.sent]

    def peer(self, address: str) -> FollowedPeer | None:
        """Return a peer by its address; None if unknown."""
        return next((peer for peer in self.follower.peers if peer.address == address), None)

    def wait_for(self, address: str, state: str, why: str = "") -> None:
        """Wait until a peer is in this state for a reason that contains `why`."""

        def is_so() -> bool:
            peer = self.peer(address)
            return peer is not None and peer.state == state and why in peer.why

        wait_until(f"{address} is {state} {why}", is_so)


@contextmanager
def following(*peers: str) -> Iterator[Recorder]:
    """Follow the peers within the context."""
    recorder = Recorder(*peers)
    recorder.follower.start()
    try:
        yield recorder
    finally:
        recorder.follower.close()


@contextmanager
def served(servicer: Any, port: int = 0) -> Iterator[str]:
    """Run a server with this service; yield its address."""
    server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
    servicer(server)
    bound = server.add_insecure_port(f"{HERE}:{port}")
    server.start()
    try:
        yield f"{HERE}:{bound}"
    finally:
        server.stop(0).wait()


@contextmanager
def sending(sender: Sender, port: int = 0, identity: PeerIdentity | None = None) -> Iterator[str]:
    """Serve the sender's changes; yield the address."""
    identity = identity or PeerIdentity(fingerprint=SEED, tiers=("gpu",))
    sender.change_log.start()
    try:
        with served(LedgerService(sender.change_log, identity).add_to, port) as address:
            yield address
    finally:
        sender.change_log.close()


@contextmanager
def false_peer(answer: Answer) -> Iterator[str]:
    """Run a peer that answers each call with the messages of `answer`; yield its address."""
    handlers = {"Follow": grpc.unary_stream_rpc_method_handler(answer)}
    with served(lambda server: server.add_registered_method_handlers(LEDGER_SERVICE, handlers)) as address:
        yield address


def message(number: int = 1, pod: str = "10.0.0.1:8000") -> bytes:
    """Return a message with one request sent."""
    (encoded,) = encode_changes(LedgerChanges([Sent(number, pod)]))
    return encoded


def rejection(address: str, request: bytes) -> grpc.RpcError:
    """Return the error of a `FollowRequest` that the router rejects."""
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as error:
        next(channel.unary_stream(FOLLOW)(request, timeout=30))
    return error.value


def test_changes_are_received_in_order() -> None:
    """A follower receives the requests in flight first, then every change."""
    sender = Sender()
    sender.ledger.dispatch(ONE)
    with sending(sender) as address, following(address) as recorder:
        recorder.wait_for(address, "followed")
        wait_until("the first", lambda: recorder.numbers == [0])
        sender.ledger.dispatch(ONE, KEYS)
        wait_until("the second", lambda: recorder.numbers == [0, 1])
        sent = [sent for changes in recorder.received for sent in changes.sent]
        assert sent[1].keys.tolist() == KEYS.tolist()
        sender.ledger.end("r1", 1.0)
        wait_until("the end", lambda: any(list(one.ended) == [0] for one in recorder.received))


def test_idle_peer_sends_heartbeats() -> None:
    """A peer without changes sends heartbeats, so it is not lost."""
    with sending(Sender()) as address, following(address) as recorder:
        recorder.wait_for(address, "followed")
        wait_until("four heartbeats", lambda: len(recorder.received) >= 5)
        assert recorder.lost == []


def test_lost_peer_is_followed_again(caplog: pytest.LogCaptureFixture) -> None:
    """A peer that shuts down is lost with its requests; back at its address it is followed from the start."""
    port, sender = free_port(), Sender()
    address = f"{HERE}:{port}"
    with following(address) as recorder:
        recorder.wait_for(address, "lost")
        with sending(sender, port):
            recorder.wait_for(address, "followed")
        with caplog.at_level(logging.WARNING):
            recorder.wait_for(address, "lost")
        assert recorder.lost[-1] == address
        sender = Sender()
        sender.ledger.dispatch(ONE)
        with sending(sender, port):
            wait_until("its request is received", lambda: recorder.numbers == [0])


def test_silent_peer_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    """A connected peer that falls silent is lost, which is logged."""
    may_end = threading.Event()

    def once(*_: object) -> Iterator[bytes]:
        yield message()
        may_end.wait(60)

    with caplog.at_level(logging.WARNING), false_peer(once) as address, following(address) as recorder:
        recorder.wait_for(address, "followed")
        wait_until("it is lost", lambda: address in recorder.lost)
        wait_until("the log says so", lambda: "silent for" in caplog.text)
        may_end.set()


def test_peer_that_never_answers_is_lost() -> None:
    """A peer that accepts the call and sends nothing does not stay "connecting": it is lost."""
    may_end = threading.Event()

    def never(*_: object) -> Iterator[bytes]:
        may_end.wait(60)
        yield from ()

    with false_peer(never) as address, following(address) as recorder:
        recorder.wait_for(address, "lost", "silent for")
        may_end.set()


def test_own_address_is_skipped() -> None:
    """A router's own address among those of a peer's name is in state "self" and not followed."""
    with sending(Sender(), identity=OURS) as address, following(address) as recorder:
        recorder.wait_for(address, "self")
        assert recorder.received == []


def test_peer_with_another_seed_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """A peer with another seed rejects the router; the state and one log line name the flag."""
    identity = PeerIdentity(fingerprint=8, tiers=("gpu",))
    caplog.set_level(logging.WARNING)
    with sending(Sender(), identity=identity) as address, following(address) as recorder:
        recorder.wait_for(address, "refused", "--hash-seed")
        wait_until("it was called again", lambda: len(recorder.lost) >= 3)
    assert caplog.text.count("peer load unavailable") == 1


def test_peer_without_a_ledger_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A peer without a ledger, such as a stand-alone indexer, is no reason for a warning."""
    caplog.set_level(logging.WARNING)
    with served(lambda _server: None) as address, following(address) as recorder:
        recorder.wait_for(address, "no_ledger")
    assert caplog.text == ""


def test_request_with_unknown_field_is_accepted() -> None:
    """A `FollowRequest` with an unknown field, as of a newer version, is accepted."""
    request = msgspec.msgpack.encode({"instance": "newer", "fingerprint": SEED, "wants": ["more"]})
    with sending(Sender()) as address, grpc.insecure_channel(address) as channel:
        assert next(channel.unary_stream(FOLLOW)(request, timeout=30)) == b""


@pytest.mark.parametrize(
    ("request_bytes", "details"),
    [
        (msgspec.msgpack.encode(FollowRequest("other", 8)), "fingerprint: "),
        (msgspec.msgpack.encode({"instance": "other"}), "broken: .*fingerprint"),
        (b"\x00", "broken: "),
        (b"", "broken: "),
    ],
)
def test_caller_without_the_seed_is_rejected(request_bytes: bytes, details: str) -> None:
    """A caller that does not prove that it knows the seed is rejected; the error names the reason."""
    with sending(Sender()) as address:
        error = rejection(address, request_bytes)
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert re.match(details, error.details())


def test_invalid_message_drops_all_requests_of_the_peer() -> None:
    """One invalid message drops all requests of the peer, which is retried."""

    def answer(*_: object) -> Iterator[bytes]:
        yield from (message(1), message(2, pod=""))

    with false_peer(answer) as address, following(address) as recorder:
        recorder.wait_for(address, "refused", "length >= 1 - at `$.sent[0].pod`")
        assert address in recorder.lost


def test_service_limits_followers() -> None:
    """A caller beyond the limit of followers is rejected with a status that permits a retry."""
    sender = Sender()
    with sending(sender) as address:
        for _ in range(64):
            sender.change_log.subscribe()
        assert rejection(address, msgspec.msgpack.encode(OTHER)).code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_unknown_name_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """A name without addresses is logged once, and listed until it resolves."""
    with caplog.at_level(logging.WARNING), following("no-such-router.invalid:9002") as recorder:
        wait_until("the name is unknown", lambda: bool(recorder.follower.unknown_names))
        wait_until("it has no peers", lambda: recorder.follower.peers == [])
    assert caplog.text.count("peer name does not resolve") == 1


def test_peer_is_removed_once_its_name_no_longer_resolves_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer whose name no longer resolves to it is followed until its call ends, then removed."""
    port = free_port()
    address, named = f"{HERE}:{port}", [("router", f"{HERE}:{port}")]
    monkeypatch.setattr(follower, "resolve", lambda _peer: list(named))
    with following("router:9002") as recorder:
        with sending(Sender(), port):
            recorder.wait_for(address, "followed")
            named.clear()
            wait_until("it still sends", lambda: len(recorder.received) >= 3)
            assert recorder.peer(address) is not None
        wait_until("it is removed", lambda: recorder.follower.peers == [])


def test_failure_of_the_change_log_reconnects_all_followers(caplog: pytest.LogCaptureFixture) -> None:
    """If a change cannot be encoded, followers are disconnected and receive everything again."""
    sender = Sender()
    change_log: ChangeLog = sender.change_log
    with sending(sender) as address, following(address) as recorder:
        recorder.wait_for(address, "followed")
        with caplog.at_level(logging.ERROR):
            # The number exceeds 64 bits, so it cannot be encoded.
            change_log.record("sent", (1 << 64, ONE, None))
            wait_until("the call has ended", lambda: len(recorder.lost) == 1)
        sender.ledger.dispatch(ONE)
        wait_until("the request is received", lambda: recorder.numbers == [0])
        assert change_log.follower_count == 1
