"""Exchanges run on different threads and ended by themselves, by clients or from outside: each ends once."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from router.h2 import frames
from router.h2.exchange_call import ExchangeMethod
from router.h2.frames import FrameType, H2Code
from tests.support.router.doors import TIMEOUT_S, wait_until
from tests.support.router.h2 import TRANSPORTS, caller, path, serving
from tests.support.router.raw_h2 import RawClient, data_frame, open_frame, prefixed


def _failing(what: str) -> Callable[..., Any]:
    def fail(*_: object) -> Any:
        raise RuntimeError(what)

    return fail


def test_an_exchange_can_be_cancelled_at_any_moment() -> None:
    """An exchange cancelled by a third thread while two others feed and run it is closed exactly once."""
    ends: list[str] = []
    with serving("threads", threads=8, requests_max=1000) as served:
        inner = served.plain.method()
        counted = ExchangeMethod(inner.open, inner.parse, inner.serialize, on_open=lambda: ends.append)
        served.server.add_exchange(path("exchange"), counted)

        def cancel_all(stop: threading.Event) -> None:
            places = random.Random(7)
            while not stop.wait(places.random() / 2000):
                for echo in list(served.plain.exchanges):
                    if not echo.closes:
                        echo.stream.cancel()

        stop = threading.Event()
        canceller = threading.Thread(target=cancel_all, args=(stop,))
        canceller.start()

        def call(channel: grpc.Channel) -> None:
            messages = (b"%d" % number for number in range(5))
            try:
                list(caller(channel, "exchange")(messages, timeout=TIMEOUT_S))
            except grpc.RpcError as error:
                code: Any = error
                assert code.code() is grpc.StatusCode.CANCELLED

        with served.channel() as channel, ThreadPoolExecutor(8) as pool:
            list(pool.map(call, [channel] * 400))
        stop.set()
        canceller.join()
        served.assert_sound()
        assert len(ends) == 400


def test_order_is_kept_across_threads() -> None:
    """Messages served alternately inline and in the pool are answered in order."""
    with serving("native", threads=4) as served:
        with served.channel() as channel, ThreadPoolExecutor(8) as pool:

            def call(seed: int) -> bool:
                places = random.Random(seed)
                sent = [b"%d " % number + bytes(places.choice([0, 3000])) for number in range(100)]

                def slowly() -> Iterator[bytes]:
                    for message in sent:
                        time.sleep(places.choice([0, 0, 0.001]))
                        yield message

                exchange = channel.stream_stream(path("exchange"))
                return list(exchange(slowly(), timeout=TIMEOUT_S)) == sent

            assert all(pool.map(call, range(32)))
        served.assert_sound()


def test_an_exchange_is_not_closed_while_it_answers() -> None:
    """If the client cancels while a thread runs the exchange, that thread closes it afterwards."""
    with serving("threads") as served:
        with RawClient(served.server.port) as client:
            client.open(1, "exchange")
            client.say(1, b"!stuck", ends=False)
            assert served.plain.entered.acquire(timeout=TIMEOUT_S)
            (echo,) = served.plain.exchanges
            client.send(frames.number_frame(FrameType.RST_STREAM, 1, H2Code.CANCEL))
            # The second message is answered after the task that the first one blocked has finished.
            for _ in range(2):
                client.send(frames.frame(FrameType.PING, 0, 0, bytes(8)))
                client.next(FrameType.PING)
            assert not echo.stream.is_active()
            assert (echo.closes, served.server.open_calls) == (0, 1)
            served.plain.released.set()
            wait_until(lambda: echo.closes == 1, "exchange is closed")
        served.assert_sound()


def test_messages_received_together_are_answered_together() -> None:
    """Responses to messages of several streams that arrive in one read leave in one write, in order."""
    with serving("native") as served:
        with RawClient(served.server.port) as client:
            said = {stream_id: prefixed(b"%d" % stream_id) for stream_id in range(1, 41, 2)}
            for stream_id in said:
                client.open(stream_id, "exchange")
                client.say(stream_id, b"!route", ends=False)
                assert client.next(FrameType.DATA, stream_id).payload == prefixed(b"!route")
            client.send(b"".join(data_frame(*one) for one in said.items()))
            assert client.socket.recv(1 << 16) == b"".join(data_frame(*one) for one in said.items())
        served.assert_sound()


@pytest.mark.parametrize("slow", ["unary", "exchange"])
def test_responses_do_not_wait_for_a_slow_call(slow: str) -> None:
    """A response leaves before the connection's thread starts a call with a larger message."""
    with serving("native") as served:
        with RawClient(served.server.port) as client:
            client.open(1, "exchange")
            client.say(1, b"!route", ends=False)
            client.next(FrameType.DATA, 1)
            begun = open_frame(3, slow) + data_frame(
                3, prefixed(b"!stuck " + bytes(9000)), ends=slow == "unary"
            )
            client.send(data_frame(1, prefixed(b"quick")) + begun)
            assert client.next(FrameType.DATA, 1).payload == prefixed(b"quick")
            assert served.plain.entered.acquire(timeout=TIMEOUT_S)
            assert served.server.open_calls == 2
            served.plain.released.set()
            assert client.next(FrameType.DATA, 3)
        served.assert_sound()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_interrupted_exchange_sends_its_last_responses(transport: str) -> None:
    """An interrupted stream finishes its responses in progress, sends the given ones and ends with OK."""
    with serving(transport) as served:
        with RawClient(served.server.port) as client:
            client.open(1, "exchange")
            client.say(1, b"first", ends=False)
            assert client.next(FrameType.DATA, 1).payload == prefixed(b"first")
            client.say(1, b"!stuck", ends=False)
            assert served.plain.entered.acquire(timeout=TIMEOUT_S)
            stream = served.plain.exchanges[0].stream
            stream.interrupt(lambda: [b"last", b"words"])
            stream.interrupt(lambda: [b"too late"])
            assert stream.is_active()
            served.plain.released.set()
            data, trailers = client.answer(1)
            assert data == prefixed(b"!stuck") + prefixed(b"last") + prefixed(b"words")
            assert trailers["grpc-status"] == "0"
            wait_until(lambda: not stream.is_active(), "stream has ended")
            stream.interrupt(lambda: [b"nobody hears"])
        served.assert_sound()


def test_interrupts_at_any_moment_end_each_exchange_once() -> None:
    """Streams ended at the same time by themselves, by clients and from outside are each closed once."""
    with serving("threads", threads=8, requests_max=1000) as served:
        stop = threading.Event()

        def interrupt_all() -> None:
            places = random.Random(9)
            while not stop.wait(places.random() / 2000):
                for echo in list(served.plain.exchanges):
                    if not echo.closes and places.random() < 0.3:
                        echo.stream.interrupt(lambda: [b"interrupted"])

        interrupter = threading.Thread(target=interrupt_all)
        interrupter.start()

        def call(channel: grpc.Channel) -> None:
            said = [b"%d" % number for number in range(5)]
            got = list(caller(channel, "exchange")(iter(said), timeout=TIMEOUT_S))
            heard = got[:-1] if got[-1:] == [b"interrupted"] else got
            assert heard == said[: len(heard)]

        with served.channel() as channel, ThreadPoolExecutor(8) as pool:
            list(pool.map(call, [channel] * 400))
        stop.set()
        interrupter.join()
        served.assert_sound()


@pytest.mark.parametrize("message", [b"!raise", b"!finish", b"unreadable", b"unwritable"])
def test_a_finished_exchange_is_closed_once(message: bytes) -> None:
    """An exchange that finishes by itself frees its slot and is closed once, also with messages pending."""
    with serving("native") as served:
        with RawClient(served.server.port) as client:
            for stream_id in range(1, 41, 2):
                said = prefixed(b"a") + prefixed(message) + prefixed(b"b") * 5
                client.send(open_frame(stream_id, "exchange") + data_frame(stream_id, said))
                client.answer(stream_id)
        served.assert_sound()


def test_failing_open_and_close_free_the_slot() -> None:
    """Exceptions in opening or closing an exchange are logged and reported; the connection stays usable."""
    with serving("native") as served:
        inner = served.plain.method()
        unopened = ExchangeMethod(_failing("closed today"), inner.parse, inner.serialize)
        served.server.add_exchange(path("unopened"), unopened)

        class Unclosable:
            """Exchange whose close() raises."""

            finished = is_routed = True

            def __init__(self, _stream: object) -> None: ...

            def answers(self, message: bytes) -> Iterator[bytes]:
                """Echo the message."""
                yield message

            def last(self) -> tuple[()]:
                """Return no responses."""
                return ()

            close = _failing("cannot end")

        served.server.add_exchange(
            path("unclosable"), ExchangeMethod(Unclosable, inner.parse, inner.serialize)
        )
        with served.channel() as channel:
            for _ in range(3):
                with pytest.raises(grpc.RpcError) as caught:
                    list(channel.stream_stream(path("unopened"))(iter([b"x"]), timeout=TIMEOUT_S))
                error: Any = caught.value
                assert error.code() is grpc.StatusCode.UNKNOWN
                unclosable = channel.stream_stream(path("unclosable"))
                assert list(unclosable(iter([b"x"]), timeout=TIMEOUT_S)) == [b"x"]
        served.assert_sound()
