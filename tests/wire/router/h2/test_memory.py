"""Memory of ended calls: freed by reference counting, without the cycle collector."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import grpc
import pytest

from router.h2.calls import Call
from tests.support.router.doors import wait_until
from tests.support.router.h2 import METHODS, caller, serving


@pytest.fixture
def begun() -> Iterator[Callable[[], int]]:
    """Return a function that counts live calls created since; the cycle collector is off meanwhile."""
    gc.collect()
    gc.disable()
    # Logs and errors of earlier tests may keep their calls alive.
    others = _calls()
    known = {id(call) for call in others}
    yield lambda: sum(id(call) not in known for call in _calls())
    gc.enable()


def _calls() -> list[Call]:
    # Not isinstance(): it reads __class__ of every object, and some of torch's objects warn at that.
    return [found for found in gc.get_objects() if issubclass(type(found), Call)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("transport", ["native", "threads"])
def test_an_ended_call_is_freed_at_once(transport: str, method: str, begun: Callable[[], int]) -> None:
    """A call, answered or failed, is freed without the collector: it may hold a large message."""
    with serving(transport) as served:
        with served.channel() as channel:
            call = caller(channel, method)
            times = b"2 " if method == "server_stream" else b""
            for order in [b"hello"] * 20 + [b"!abort on purpose"] * 3 * (method != "exchange"):
                request = times + order
                given = iter([request]) if method == "exchange" else request
                try:
                    answer = call(given)
                    assert b"".join([answer] if isinstance(answer, bytes) else answer)
                except grpc.RpcError:
                    assert order.startswith(b"!")
        wait_until(lambda: served.server.open_calls == 0, "all calls have ended")
        served.plain.exchanges.clear()
        wait_until(lambda: begun() == 0, "all calls are freed")
