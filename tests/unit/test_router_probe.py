"""Probes over real sockets: kept connections, deadlines, and pods that answer badly."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager

import pytest

from indexer.pod_entry import ADMIN_PORT_LABEL
from router.pods.pod_set import metrics_page
from router.pods.probe import HttpGetter, Prober, ProbeResult
from tests.unit.router_support import entry
from tests.unit.test_router_scrape import PAGE, TRTLLM

Answer = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]

OK = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b"
MODELS = b'{"data":[{"id":"m"}]}'
GOOD = {b"/health": b"", b"/v1/models": MODELS, b"/metrics": PAGE}


class Pod:
    """A server that answers each request by `answer`, and counts connections and requests."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.connections = 0
        self.heads: list[bytes] = []

    @property
    def requests(self) -> int:
        """How many came."""
        return len(self.heads)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.heads.append(head)
                await self._answer(head.split(b" ")[1], writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


async def well(path: bytes, writer: asyncio.StreamWriter) -> None:
    """A healthy pod."""
    writer.write(OK % (len(GOOD[path]), GOOD[path]))


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[tuple[Pod, str]]:
    """A pod on a free port."""
    pod = Pod(answer)
    server = await asyncio.start_server(pod.serve, "127.0.0.1", 0)
    try:
        yield pod, f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def probed(answer: Answer, *, timeout_s: float = 20.0, times: int = 1) -> tuple[ProbeResult, Pod]:
    """The last of some probes of a pod."""

    async def probe() -> tuple[ProbeResult, Pod]:
        async with serving(answer) as (pod, address):
            prober = Prober(timeout_s=timeout_s)
            for _ in range(times):
                result = await prober.probe(entry(address), models=True, sources=False)
            prober.close()
        return result, pod

    return asyncio.run(probe())


def test_a_healthy_pod_tells_health_models_and_load_over_one_connection() -> None:
    """Probe after probe asks three pages each, on the connection of the first."""
    result, pod = probed(well, times=3)
    assert (result.healthy, result.why) == (True, "")
    assert result.models is not None
    assert result.models.base == "m"
    assert result.load is not None
    assert (result.load.waiting, result.why_no_load) == (3, "")
    assert (pod.connections, pod.requests) == (1, 9)


def test_a_connection_that_the_pod_closed_says_nothing_of_the_pod() -> None:
    """A pod that closes after every answer is asked anew each time, and is healthy."""

    async def close_after(path: bytes, writer: asyncio.StreamWriter) -> None:
        await well(path, writer)
        await writer.drain()
        writer.close()

    result, pod = probed(close_after, times=2)
    assert result.healthy
    assert result.load is not None
    assert pod.connections == 6


def test_a_body_without_a_length_ends_with_its_connection() -> None:
    """An old server's answer, whose end is the connection's, is read whole."""

    async def without_length(path: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + GOOD[path])
        await writer.drain()
        writer.close()

    result, _ = probed(without_length)
    assert result.load is not None
    assert result.load.waiting == 3


def test_chunked_bodies_are_joined() -> None:
    """A page that comes in chunks is the same page."""

    async def chunked(path: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for chunk in (GOOD[path][:50], GOOD[path][50:]):
            if chunk:
                writer.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
                await writer.drain()
        writer.write(b"0\r\n\r\n")

    result, _ = probed(chunked)
    assert result.load is not None
    assert result.load.waiting == 3


@pytest.mark.parametrize("trickling", [b"/health", b"/metrics"])
def test_a_pod_that_trickles_is_given_up_at_the_deadline(trickling: bytes) -> None:
    """A byte now and then does not move the deadline: no health in time is a timeout, no metrics no load."""

    async def trickle(path: bytes, writer: asyncio.StreamWriter) -> None:
        if path != trickling:
            await well(path, writer)
            return
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
        while not writer.is_closing():
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0.01)

    result, _ = probed(trickle, timeout_s=2.0)
    assert (result.healthy, result.timed_out) == ((False, True) if trickling == b"/health" else (True, False))
    assert result.load is None


def test_a_flood_instead_of_a_page_is_cut_off() -> None:
    """A metrics page without end costs its load, not the router's memory."""

    async def flood(path: bytes, writer: asyncio.StreamWriter) -> None:
        if path != b"/metrics":
            await well(path, writer)
            return
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 64000000\r\n\r\n")
        for _ in range(1000):
            writer.write(b"x" * 64_000)
            await writer.drain()

    result, _ = probed(flood)
    assert result.healthy
    assert result.load is None
    assert result.why_no_load.endswith("/metrics: more than 4194304 bytes")


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"HTTP/1.1 503 no\r\ncontent-length: 0\r\n\r\n", "/health answered 503"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "/health: no HTTP answer"),
        (b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 40_000 + b"\r\n", "/health: headers too long"),
        (b"HTTP/1.1 200 OK\r\ncontent-len", "/health: "),
    ],
)
def test_a_bad_answer_is_no_health(sent: bytes, why: str) -> None:
    """An error status, another protocol, endless headers and half an answer take the pod out, with why."""

    async def badly(path: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        await writer.drain()
        writer.close()

    result, _ = probed(badly)
    assert (result.healthy, result.timed_out) == (False, False)
    assert result.why.startswith(why)


def test_a_pod_that_is_not_there_is_refused_at_once() -> None:
    """A closed port is a refusal, not a timeout."""

    async def probe() -> ProbeResult:
        async with serving(well) as (_, address):
            pass
        return await Prober(timeout_s=20.0).probe(entry(address), models=False, sources=False)

    result = asyncio.run(probe())
    assert (result.healthy, result.timed_out) == (False, False)
    assert (result.refused, result.unreachable) == (True, False)


@contextmanager
def dropping() -> Iterator[str]:
    """A port whose packets are dropped, as those of a listener whose queue is full are."""
    with ExitStack() as sockets:
        listener = sockets.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(8):
            client = sockets.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(listener.getsockname())
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_a_pod_whose_packets_are_dropped_is_unreachable() -> None:
    """Without a connection in time the pod is told from one that takes it and is slow to answer."""

    async def probe(address: str) -> ProbeResult:
        return await Prober(timeout_s=0.5).probe(entry(address), models=False, sources=False)

    with dropping() as address:
        result = asyncio.run(probe(address))
    assert (result.timed_out, result.refused, result.unreachable) == (True, False, True)
    assert result.why == "/health: no connection within 0.5 s"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        result = asyncio.run(probe(f"127.0.0.1:{silent.getsockname()[1]}"))
    assert (result.timed_out, result.refused, result.unreachable) == (True, False, False)


ENGINE, OLD_ENGINE = "llm-d.ai/engine-type", "inference.networking.k8s.io/engine-type"
PORT, PATH = "kvroute.io/metrics-port", "kvroute.io/metrics-path"


@pytest.mark.parametrize(
    ("labels", "address", "path"),
    [
        ({}, "10.0.0.1:8000", "/metrics"),
        ({ENGINE: "vllm"}, "10.0.0.1:8000", "/metrics"),
        ({ENGINE: "trtllm-serve"}, "10.0.0.1:8000", "/prometheus/metrics"),
        ({OLD_ENGINE: "trtllm-serve"}, "10.0.0.1:8000", "/prometheus/metrics"),
        ({OLD_ENGINE: "trtllm-serve", ENGINE: "vllm"}, "10.0.0.1:8000", "/metrics"),
        ({ENGINE: "trtllm-serve", PATH: "/m"}, "10.0.0.1:8000", "/m"),
        ({PORT: "8002"}, "10.0.0.1:8002", "/metrics"),
    ],
)
def test_a_pods_labels_say_where_its_metrics_are(labels: dict[str, str], address: str, path: str) -> None:
    """Port and path by labels of ours, else the path by the engine's type; else /metrics as it is served."""
    assert metrics_page(entry("10.0.0.1:8000", **labels)) == (address, path)


def test_engines_of_an_unknown_type_have_the_configured_path() -> None:
    """The path of the configuration counts where neither the pod nor its engine's type has one."""
    labels: list[dict[str, str]] = [{}, {ENGINE: "trtllm-serve"}]
    paths = [metrics_page(entry("10.0.0.1:8000", **each), "/all")[1] for each in labels]
    assert paths == ["/all", "/prometheus/metrics"]


def test_a_load_is_read_where_the_engine_tells_it() -> None:
    """Metrics at another port and path are read over their own connection, kept until the pod is gone."""

    async def metrics(path: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(OK % (len(TRTLLM), TRTLLM) if path == b"/prometheus/metrics" else OK % (2, b"[]"))

    async def probe() -> tuple[ProbeResult, ProbeResult, Pod, Pod]:
        async with serving(well) as (pod, address), serving(metrics) as (teller, elsewhere):
            prober = Prober(timeout_s=20.0)
            port = elsewhere.rpartition(":")[2]
            page = entry(address, **{PORT: port, PATH: "/prometheus/metrics"})
            results = [await prober.probe(page, models=False, sources=False) for _ in range(2)]
            blind = await prober.probe(entry(address, **{PORT: port}), models=False, sources=False)
            prober.forget(address)
            await prober.probe(page, models=False, sources=False)
            prober.close()
        return results[-1], blind, pod, teller

    told, blind, pod, teller = asyncio.run(probe())
    assert told.load is not None
    assert (told.load.waiting, told.why_no_load) == (3, "")
    assert (blind.healthy, blind.load) == (True, None)
    assert "/metrics has no valid metrics of a known engine" in blind.why_no_load
    assert [(one.connections, one.requests) for one in (pod, teller)] == [(2, 4), (2, 4)]


@pytest.mark.parametrize("token", [None, "s3cret"])
def test_the_token_goes_to_the_administration_port_alone(token: str | None) -> None:
    """Event sources are asked for at the administration port with the token, which no other page is sent."""

    async def answer(path: bytes, writer: asyncio.StreamWriter) -> None:
        page = b'{"0": {"enable_kv_cache_events": true, "endpoint": "tcp://*:7000"}}'
        writer.write(OK % (len(page), page) if path == b"/kv_event_sources" else OK % (2, b"[]"))

    async def probe() -> tuple[list[ProbeResult], Pod, Pod]:
        async with serving(answer) as (pod, address), serving(answer) as (admin, admin_address):
            prober = Prober(timeout_s=20.0, admin_token=token)
            labels = {ADMIN_PORT_LABEL: admin_address.rpartition(":")[2]}
            results = [
                await prober.probe(entry(address, **labels), models=True, sources=True),
                await prober.probe(entry(address), models=False, sources=True),
            ]
            prober.close()
        return results, pod, admin

    results, pod, admin = asyncio.run(probe())
    assert [result.sources and result.sources.reported for result in results] == [True, True]
    (head,) = admin.heads
    assert head.startswith(b"GET /kv_event_sources ")
    assert (b"\r\nAuthorization: Bearer s3cret\r\n" in head) == (token is not None)
    paths = [head.split(b" ")[1] for head in pod.heads]
    assert paths == [b"/health", b"/v1/models", b"/metrics", b"/health", b"/kv_event_sources", b"/metrics"]
    assert not any(b"uthorization" in head for head in pod.heads)


def test_a_sleeping_engine_is_told_with_the_time_of_the_question() -> None:
    """Whoever compares the page with newer events, or with what was sent, knows from when on it is old."""
    asleep = PAGE + b'vllm:engine_sleep_state{engine="0",sleep_state="awake"} 0.0\n'

    async def answer(path: bytes, writer: asyncio.StreamWriter) -> None:
        if path == b"/metrics":
            writer.write(OK % (len(asleep), asleep))
        else:
            await well(path, writer)

    asked_s = time.monotonic()
    result, _ = probed(answer)
    assert (result.healthy, result.asleep, probed(well)[0].asleep) == (True, True, False)
    assert result.reading is not None
    assert result.load is not None
    assert result.reading.asleep
    assert result.reading.asked_s == result.load.asked_s
    assert asked_s <= result.load.asked_s <= result.load.scraped_s


def test_pods_that_share_a_metrics_port_do_not_disturb_each_other() -> None:
    """Two exchanges with one address at once are each answered, and one connection is kept of theirs."""

    async def get() -> tuple[list[tuple[int, bytes]], int]:
        async with serving(well) as (pod, address):
            http = HttpGetter(body_bytes_max=1 << 20, timeout_s=60.0)
            answers = [*await asyncio.gather(http.get(address, "/metrics"), http.get(address, "/v1/models"))]
            answers.append(await http.get(address, "/metrics"))
            http.close()
        return answers, pod.connections

    answers, connections = asyncio.run(get())
    assert answers == [(200, PAGE), (200, MODELS), (200, PAGE)]
    assert connections == 2
