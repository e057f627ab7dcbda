"""Other routers' ledgers over real gRPC: of peers that tell, end, fall silent, refuse, make no sense."""

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
import numpy as np
import pytest

from indexer.config import IndexerConfig
from indexer.peers.service import PeerIdentity
from router.feedback import follower as follow
from router.feedback.change_log import LEDGER_SERVICE, Journal, LedgerDoor
from router.feedback.follower import Followers, Peer
from router.feedback.messages import FOLLOW, FollowRequest, News, Sent, news_messages
from tests.loopback import HERE, free_port
from tests.unit.test_replicas import KEYS, ONE
from tests.unit.test_replicas import Teller as Told
from tests.wire.engine_publisher import wait_until

SEED = 7
OURS = PeerIdentity(fingerprint=SEED, tiers=("gpu",))
OTHER = FollowRequest("other", SEED)
Answer = Callable[[bytes, grpc.ServicerContext], Iterator[bytes]]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes seconds takes tenths of them."""
    monkeypatch.setattr(follow, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(follow, "SILENCE_MAX_S", 2.0)
    monkeypatch.setattr(follow, "REFUSED_AGAIN_S", 0.2)
    monkeypatch.setattr(follow, "AGAIN_S", 0.05)
    monkeypatch.setattr(follow, "AGAIN_MAX_S", 0.1)


class Watched:
    """Who follows, and what came of it."""

    def __init__(self, *peers: str) -> None:
        self.news: list[News] = []
        self.lost: list[str] = []
        config = IndexerConfig(hash_seed=SEED, peers=peers)
        self.followers = Followers(config, OURS, self._take, self._lose)

    def _take(self, _address: str, news: News, _now_s: float) -> None:
        self.news.append(news)

    def _lose(self, address: str, _now_s: float) -> int:
        self.lost.append(address)
        return 0

    @property
    def numbers(self) -> list[int]:
        """Requests that were told."""
        return [sent.number for news in self.news for sent in news.sent]

    def state(self, address: str) -> Peer | None:
        """How one peer stands; None: it is not known."""
        return next((one for one in self.followers.peers if one.address == address), None)

    def wait_for(self, address: str, state: str, why: str = "") -> None:
        """Waits for a peer to be in a state, for a reason that has this in it."""

        def is_so() -> bool:
            one = self.state(address)
            return one is not None and one.state == state and why in one.why

        wait_until(f"{address} is {state} {why}", is_so)


@contextmanager
def following(*peers: str) -> Iterator[Watched]:
    """Follows peers."""
    watched = Watched(*peers)
    watched.followers.start()
    try:
        yield watched
    finally:
        watched.followers.close()


@contextmanager
def served(servicer: Any, port: int = 0) -> Iterator[str]:
    """A server of this service; yields its address."""
    server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
    servicer(server)
    bound = server.add_insecure_port(f"{HERE}:{port}")
    server.start()
    try:
        yield f"{HERE}:{bound}"
    finally:
        server.stop(0).wait()


@contextmanager
def telling(told: Told, port: int = 0, identity: PeerIdentity | None = None) -> Iterator[str]:
    """A router's own door."""
    identity = identity or PeerIdentity(fingerprint=SEED, tiers=("gpu",))
    told.journal.start()
    try:
        with served(LedgerDoor(told.journal, identity).add_to, port) as address:
            yield address
    finally:
        told.journal.close()


@contextmanager
def false_peer(answer: Answer) -> Iterator[str]:
    """A peer that tells what it is made to."""
    handlers = {"Follow": grpc.unary_stream_rpc_method_handler(answer)}
    with served(lambda server: server.add_registered_method_handlers(LEDGER_SERVICE, handlers)) as address:
        yield address


def news(number: int = 1, pod: str = "10.0.0.1:8000") -> bytes:
    """A request."""
    (message,) = news_messages(News([Sent(number, pod)]))
    return message


def refusal(address: str, request: bytes) -> grpc.RpcError:
    """How a router refuses to tell who asks by this."""
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as refused:
        next(channel.unary_stream(FOLLOW)(request, timeout=30))
    return refused.value


def test_changes_come_as_they_are_made() -> None:
    """What is in flight comes first, then each change; a peer without news is followed, too."""
    told = Told()
    told.ledger.dispatch(ONE)
    with telling(told) as address, following(address) as watched:
        watched.wait_for(address, "followed")
        wait_until("the first", lambda: watched.numbers == [0])
        told.ledger.dispatch(ONE, KEYS)
        wait_until("the second", lambda: watched.numbers == [0, 1])
        assert [np.array(sent.keys).tolist() for one in watched.news for sent in one.sent][1] == KEYS.tolist()
        told.ledger.end("r1", 1.0)
        wait_until("the end", lambda: any(list(one.ended) == [0] for one in watched.news))


def test_a_quiet_peer_gives_signs_of_life() -> None:
    """Nothing to tell is no silence."""
    with telling(Told()) as address, following(address) as watched:
        watched.wait_for(address, "followed")
        wait_until("four heartbeats", lambda: len(watched.news) >= 5)
        assert watched.lost == []


def test_a_peer_that_ends_is_lost_and_followed_again(caplog: pytest.LogCaptureFixture) -> None:
    """Its requests count no longer; back at its address it is followed from the start."""
    port, told = free_port(), Told()
    address = f"{HERE}:{port}"
    with following(address) as watched:
        watched.wait_for(address, "lost")
        with telling(told, port):
            watched.wait_for(address, "followed")
        with caplog.at_level(logging.WARNING):
            watched.wait_for(address, "lost")
        assert watched.lost[-1] == address
        told = Told()
        told.ledger.dispatch(ONE)
        with telling(told, port):
            wait_until("it is told anew", lambda: watched.numbers == [0])


def test_a_silent_peer_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    """One whose connection stands and that says nothing any more is given up, loudly."""
    may_end = threading.Event()

    def once(*_: object) -> Iterator[bytes]:
        yield news()
        may_end.wait(60)

    with caplog.at_level(logging.WARNING), false_peer(once) as address, following(address) as watched:
        watched.wait_for(address, "followed")
        wait_until("it is lost", lambda: address in watched.lost)
        wait_until("the log says so", lambda: "silent for" in caplog.text)
        may_end.set()


def test_a_peer_that_never_says_anything_is_lost() -> None:
    """One that takes the call and is stuck does not stay "connecting" for ever: nobody would hear of it."""
    may_end = threading.Event()

    def never(*_: object) -> Iterator[bytes]:
        may_end.wait(60)
        yield from ()

    with false_peer(never) as address, following(address) as watched:
        watched.wait_for(address, "lost", "silent for")
        may_end.set()


def test_we_are_not_our_own_peer() -> None:
    """A name of all routers has our own address, too: that one is passed over."""
    with telling(Told(), identity=OURS) as address, following(address) as watched:
        watched.wait_for(address, "self")
        assert watched.news == []


def test_a_peer_with_another_seed_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """It tells nothing: the state says which flags differ, and so does the log, once."""
    identity = PeerIdentity(fingerprint=8, tiers=("gpu",))
    caplog.set_level(logging.WARNING)
    with telling(Told(), identity=identity) as address, following(address) as watched:
        watched.wait_for(address, "refused", "--hash-seed")
        wait_until("it was asked again", lambda: len(watched.lost) >= 3)
    assert caplog.text.count("does not tell of its requests") == 1


def test_a_peer_without_a_ledger_is_nothing_to_wonder_about(caplog: pytest.LogCaptureFixture) -> None:
    """A stand-alone indexer may be a peer, for its views."""
    caplog.set_level(logging.WARNING)
    with served(lambda _server: None) as address, following(address) as watched:
        watched.wait_for(address, "no_ledger")
    assert caplog.text == ""


def test_a_newer_router_that_asks_is_told() -> None:
    """A request with a field that this version does not know is answered."""
    request = msgspec.msgpack.encode({"instance": "newer", "fingerprint": SEED, "wants": ["more"]})
    with telling(Told()) as address, grpc.insecure_channel(address) as channel:
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
def test_who_asks_without_the_seed_is_refused(request_bytes: bytes, details: str) -> None:
    """Only who shows that it knows the seed is told anything; the refusal names what is wrong."""
    with telling(Told()) as address:
        error = refusal(address, request_bytes)
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert re.match(details, error.details())


def test_a_peer_that_makes_no_sense_is_believed_nothing() -> None:
    """One wrong number voids all that it told; it is asked again, and may do better."""

    def answer(*_: object) -> Iterator[bytes]:
        yield from (news(1), news(2, pod=""))

    with false_peer(answer) as address, following(address) as watched:
        watched.wait_for(address, "refused", "length >= 1 - at `$.sent[0].pod`")
        assert address in watched.lost


def test_the_door_serves_so_many() -> None:
    """Who comes when too many follow is told so, and may ask again."""
    told = Told()
    with telling(told) as address:
        for _ in range(64):
            told.journal.join()
        assert refusal(address, msgspec.msgpack.encode(OTHER)).code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_an_unknown_name_is_told_and_looked_up_again(caplog: pytest.LogCaptureFixture) -> None:
    """A name without addresses is in the log once and in the state until it has some."""
    with caplog.at_level(logging.WARNING), following("no-such-router.invalid:9002") as watched:
        wait_until("it is known to be unknown", lambda: bool(watched.followers.unknown_names))
        wait_until("it was looked up often", lambda: watched.followers.peers == [])
    assert caplog.text.count("its name is not known") == 1


def test_an_address_that_nobody_names_any_more_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that is gone for good leaves the list; one that still tells is followed to its end."""
    port = free_port()
    address, named = f"{HERE}:{port}", [("router", f"{HERE}:{port}")]
    monkeypatch.setattr(follow, "resolve", lambda _peer: list(named))
    with following("router:9002") as watched:
        with telling(Told(), port):
            watched.wait_for(address, "followed")
            named.clear()
            wait_until("it is told of still", lambda: len(watched.news) >= 3)
            assert watched.state(address) is not None
        wait_until("it is forgotten", lambda: watched.followers.peers == [])


def test_a_journal_that_fails_begins_anew(caplog: pytest.LogCaptureFixture) -> None:
    """What could not be told ends all accounts, and whoever followed is told all again."""
    told = Told()
    journal: Journal = told.journal
    with telling(told) as address, following(address) as watched:
        watched.wait_for(address, "followed")
        with caplog.at_level(logging.ERROR):
            # No message can hold it.
            journal.record("sent", (1 << 64, ONE, None))
            wait_until("it is asked anew", lambda: len(watched.lost) == 1)
        told.ledger.dispatch(ONE)
        wait_until("it is told", lambda: watched.numbers == [0])
        assert journal.readers == 1
