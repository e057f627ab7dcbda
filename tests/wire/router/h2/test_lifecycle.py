"""Start and shutdown of the server, and calls that are cancelled or reset at any moment."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from router.errors import ListenError
from router.h2 import GrpcServer, frames
from router.h2.frames import FrameType, H2Code, Setting
from tests.support.router.doors import TIMEOUT_S, wait_until
from tests.support.router.h2 import METHODS, TRANSPORTS, caller, serving
from tests.support.router.raw_h2 import RawClient, data_frame, open_frame, prefixed


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_drain_lets_calls_finish(transport: str) -> None:
    """Drained clients receive GOAWAY; their calls finish, and so do calls already on the way."""
    with serving(transport) as served, RawClient(served.server.port) as client:
        for stream_id, method in enumerate(METHODS):
            client.open(2 * stream_id + 1, method)
        client.send(data_frame(3, prefixed(b"2 x")[:4]))
        wait_until(lambda: served.server.open_calls == len(METHODS), "all calls have started")
        served.server.drain()
        goaway = client.next(FrameType.GOAWAY)
        assert goaway.payload[:8] == frames.STREAM_IDS.to_bytes(4, "big") + bytes(4)
        client.send(data_frame(3, prefixed(b"2 x")[4:], ends=True))
        assert client.answer(3)[0] == prefixed(b"x") * 2
        for stream_id in (1, 5):
            client.say(stream_id, b"%d" % stream_id)
            assert client.answer(stream_id)[0] == prefixed(b"%d" % stream_id)
        client.open(13)
        client.say(13, b"crossed the notice")
        assert client.answer(13)[0] == prefixed(b"crossed the notice")


def test_a_drained_channel_reconnects() -> None:
    """grpcio's client makes further calls on another connection and loses none."""
    with serving("native") as served, served.channel() as channel:
        unary, stop = caller(channel, "unary"), threading.Event()

        def calls() -> int:
            count = 0
            while not stop.is_set():
                assert unary(b"x", timeout=TIMEOUT_S) == b"x"
                count += 1
            return count

        with ThreadPoolExecutor(4) as pool:
            counts = [pool.submit(calls) for _ in range(4)]
            for _ in range(20):
                served.server.drain()
                time.sleep(0.02)
            stop.set()
            assert all(one.result() for one in counts)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_close_ends_blocked_calls(transport: str) -> None:
    """close() ends calls whose servicer, client or writer is blocked, and their clients notice."""
    with serving(transport, threads=8) as served, served.channel() as channel:
        stuck = [caller(channel, "server_stream")(b"1 !stuck", timeout=60) for _ in range(3)]
        silent = caller(channel, "exchange")(iter(threading.Event().wait, None), timeout=60)
        wide = {Setting.INITIAL_WINDOW_SIZE: frames.WINDOW_BYTES_MOST}
        with RawClient(served.server.port, wide) as deaf:
            deaf.send(frames.number_frame(FrameType.WINDOW_UPDATE, 0, frames.WINDOW_BYTES_MOST - 65_535))
            for stream_id in range(1, 9, 2):
                deaf.open(stream_id, "server_stream")
                deaf.say(stream_id, b"1 !large 8000000")
            for _ in stuck:
                assert served.plain.entered.acquire(timeout=TIMEOUT_S)
            wait_until(deaf.is_full, "a writer is blocked by the deaf client")
            closer = threading.Thread(target=served.server.close)
            closer.start()
            # Far below the write timeout.
            closer.join(8.0)
            assert not closer.is_alive()
            for call in (*stuck, silent):
                with pytest.raises(grpc.RpcError) as caught:
                    next(call)
                error: Any = caught.value
                assert error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL)
        served.server.close()


def test_a_closed_port_can_be_reused() -> None:
    """A server can start again on its port at once, with clients still connected."""
    with serving("native") as served, RawClient(served.server.port) as client:
        client.next(FrameType.SETTINGS)
        port = served.server.port
        served.server.close()
        again = GrpcServer(
            "--grpc-port",
            "127.0.0.1",
            port,
            threads=1,
            requests_max=1,
            message_bytes_max=0,
            services=[served.plain.add_to],
            inline={},
        )
        again.start()
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            ready = caller(channel, "unary")(b"again", timeout=TIMEOUT_S, wait_for_ready=True)
            assert ready == b"again"
        with pytest.raises(ListenError, match=f"--other {port}: cannot listen on 127.0.0.1:{port}: "):
            GrpcServer(
                "--other",
                "127.0.0.1",
                port,
                threads=1,
                requests_max=1,
                message_bytes_max=0,
                services=[],
                inline={},
            )
        again.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("method", METHODS)
def test_cancels_at_any_moment_free_their_slots(transport: str, method: str) -> None:
    """Calls cancelled before, while and after they are served free their slots; exchanges are closed once."""
    count, places = 400, random.Random(5)
    with serving(transport, threads=8, requests_max=2 * count) as served:
        with RawClient(served.server.port) as client:
            sent: list[bytes] = []
            for number in range(count):
                stream_id, payload = 2 * number + 1, prefixed(b"1 " + bytes(places.choice([1, 1 << 15])))
                at = places.randrange(len(payload) + 1)
                parts = [
                    open_frame(stream_id, method),
                    data_frame(stream_id, payload[:at]),
                    data_frame(stream_id, payload[at:], ends=True),
                ]
                reset = frames.number_frame(FrameType.RST_STREAM, stream_id, H2Code.CANCEL)
                parts.insert(places.randint(1, 3), reset)
                sent += parts if places.random() < 0.5 else [b"".join(parts)]
            reader = threading.Thread(target=client.end)
            reader.start()
            for part in sent:
                client.send(part)
                if places.random() < 0.1:
                    time.sleep(places.random() / 1000)
            client.socket.shutdown(1)
            reader.join()
        served.assert_sound()


def _failing(what: str) -> Callable[..., Any]:
    def fail(*_: object) -> Any:
        raise RuntimeError(what)

    return fail


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("method", ["unary", "server_stream"])
def test_a_failing_callback_is_logged(transport: str, method: str) -> None:
    """A servicer's callback that raises is logged; the others run, and the call's slot is freed."""
    with serving(transport) as served:
        called = threading.Semaphore(0)

        def careless(_rest: bytes, context: grpc.ServicerContext) -> bytes:
            context.add_callback(_failing("a callback"))
            context.add_callback(called.release)
            return b"done"

        served.plain.orders["careless"] = careless
        with served.channel() as channel:
            for _ in range(5):
                if method == "unary":
                    assert caller(channel, method)(b"!careless", timeout=TIMEOUT_S) == b"done"
                else:
                    assert list(caller(channel, method)(b"1 !careless", timeout=TIMEOUT_S)) == [b"done"]
                assert called.acquire(timeout=TIMEOUT_S)
        served.assert_sound()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_calls_above_the_limit_are_rejected(transport: str) -> None:
    """A call above the limit ends with RESOURCE_EXHAUSTED; after a call ends, another is served."""
    with serving(transport, requests_max=3) as served:
        with served.channel() as channel:
            held = [caller(channel, "server_stream")(b"1 !hold", timeout=60) for _ in range(3)]
            for _ in held:
                assert served.plain.entered.acquire(timeout=TIMEOUT_S)
            with pytest.raises(grpc.RpcError) as caught:
                caller(channel, "unary")(b"x", timeout=TIMEOUT_S)
            error: Any = caught.value
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert error.details() == "Concurrent RPC limit exceeded!"
            held.pop().cancel()
            wait_until(lambda: served.server.open_calls == 2, "a slot is free")
            assert caller(channel, "unary")(b"x", timeout=TIMEOUT_S) == b"x"
        served.assert_sound()
