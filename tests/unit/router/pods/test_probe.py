"""Probes over sockets: kept connections, timeouts, and invalid responses."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager

import pytest

from indexer.pod_entry import ADMIN_PORT_LABEL
from router.pods.pod_set import MetricsPage, metrics_page
from router.pods.probe import HttpGetter, Prober, ProbeResult
from tests.support.router.bench import entry
from tests.unit.router.pods.test_engine_load import PAGE, TRTLLM

Answer = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]

OK = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b"
MODELS = b'{"data":[{"id":"m"}]}'
GOOD = {b"/health": b"", b"/v1/models": MODELS, b"/metrics": PAGE}


class Pod:
    """Server that answers each request by `answer`, and counts connections and requests."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.connections = 0
        self.heads: list[bytes] = []

    @property
    def requests(self) -> int:
        """Number of requests received."""
        return len(self.heads)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
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
    """Return the response of a healthy pod."""
    writer.write(OK % (len(GOOD[path]), GOOD[path]))


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[tuple[Pod, str]]:
    """Yield a pod on a free port."""
    pod = Pod(answer)
    server = await asyncio.start_server(pod.serve, "127.0.0.1", 0)
    try:
        yield pod, f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def probed(answer: Answer, *, timeout_s: float = 20.0, times: int = 1) -> tuple[ProbeResult, Pod]:
    """Return the last of several probes of a pod, and the pod."""

    async def probe() -> tuple[ProbeResult, Pod]:
        async with serving(answer) as (pod, address):
            prober = Prober(timeout_s=timeout_s)
            for _ in range(times):
                result = await prober.probe(entry(address), models=True, sources=False)
            prober.close()
        return result, pod

    return asyncio.run(probe())


def test_probes_use_one_connection() -> None:
    """Repeated probes request three pages each over one connection."""
    result, pod = probed(well, times=3)
    assert (result.healthy, result.why) == (True, "")
    assert result.models is not None
    assert result.models.base == "m"
    assert result.load is not None
    assert (result.load.waiting, result.why_no_load) == (3, "")
    assert (pod.connections, pod.requests) == (1, 9)


def test_a_connection_closed_by_the_pod_is_replaced() -> None:
    """A pod that closes after every response is probed over new connections and is healthy."""

    async def close_after(path: bytes, writer: asyncio.StreamWriter) -> None:
        await well(path, writer)
        await writer.drain()
        writer.close()

    result, pod = probed(close_after, times=2)
    assert result.healthy
    assert result.load is not None
    assert pod.connections == 6


def test_a_body_without_length_ends_with_its_connection() -> None:
    """A response that ends with its connection is read completely."""

    async def without_length(path: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + GOOD[path])
        await writer.drain()
        writer.close()

    result, _ = probed(without_length)
    assert result.load is not None
    assert result.load.waiting == 3


def test_chunked_bodies_are_joined() -> None:
    """A chunked page is read completely."""

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
def test_a_slow_response_times_out(trickling: bytes) -> None:
    """Single bytes do not extend the timeout: /health then times out, and metrics give no load."""

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


def test_an_endless_page_is_cut_off() -> None:
    """A metrics page above the limit gives no load."""

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
def test_an_invalid_response_is_unhealthy(sent: bytes, why: str) -> None:
    """An error status, another protocol, endless headers or a partial response make a pod unhealthy."""

    async def badly(path: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        await writer.drain()
        writer.close()

    result, _ = probed(badly)
    assert (result.healthy, result.timed_out) == (False, False)
    assert result.why.startswith(why)


def test_a_closed_port_is_refused() -> None:
    """A closed port is reported as refused, not as a timeout."""

    async def probe() -> ProbeResult:
        async with serving(well) as (_, address):
            pass
        return await Prober(timeout_s=20.0).probe(entry(address), models=False, sources=False)

    result = asyncio.run(probe())
    assert (result.healthy, result.timed_out) == (False, False)
    assert (result.refused, result.unreachable) == (True, False)


@contextmanager
def dropping() -> Iterator[str]:
    """Yield an address whose packets are dropped, like those of a listener with a full queue."""
    with ExitStack() as sockets:
        listener = sockets.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(8):
            client = sockets.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(listener.getsockname())
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_dropped_packets_are_unreachable() -> None:
    """A pod that accepts no connection in time is unreachable, unlike one that responds slowly."""

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
def test_labels_set_the_metrics_page(labels: dict[str, str], address: str, path: str) -> None:
    """Port and path come from labels, else the path from the engine type, else /metrics."""
    assert metrics_page(entry("10.0.0.1:8000", **labels)) == (address, path)


def test_unknown_engine_types_have_the_configured_path() -> None:
    """The configured port and path apply to pods without their own; an engine type may have a path."""
    labels: list[dict[str, str]] = [{}, {ENGINE: "trtllm-serve"}]
    pages = [metrics_page(entry("10.0.0.1:8000", **each), MetricsPage("/all", 8002)) for each in labels]
    assert pages == [("10.0.0.1:8002", "/all"), ("10.0.0.1:8002", "/prometheus/metrics")]


def test_a_load_is_read_from_its_metrics_page() -> None:
    """Metrics at another port and path are read over their own connection."""

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
def test_the_token_is_sent_to_the_admin_port_only(token: str | None) -> None:
    """The bearer token is sent with /kv_event_sources on the admin port, and with no other request."""

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


@pytest.mark.parametrize(("status", "failure"), [(200, ""), (404, "/wake_up answered 404")])
def test_an_engine_is_woken_at_its_admin_port(status: int, failure: str) -> None:
    """Waking posts to /wake_up, at the admin port with the token where the pod has one; failures are told."""

    async def answer(_path: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 %d X\r\ncontent-length: 0\r\n\r\n" % status)

    async def wake() -> tuple[list[str], Pod, Pod]:
        async with serving(answer) as (pod, address), serving(answer) as (admin, admin_address):
            prober = Prober(timeout_s=20.0, admin_token="s3cret")
            labels = {ADMIN_PORT_LABEL: admin_address.rpartition(":")[2]}
            results = [await prober.wake(each) for each in (entry(address), entry(address, **labels))]
            prober.close()
        return results, pod, admin

    results, pod, admin = asyncio.run(wake())
    assert results == [failure, failure]
    assert [head.split(b"\r\n")[0] for head in (*pod.heads, *admin.heads)] == [b"POST /wake_up HTTP/1.1"] * 2
    assert b"Bearer s3cret" in admin.heads[0]
    assert b"Bearer" not in pod.heads[0]


def test_a_page_carries_the_time_of_its_request() -> None:
    """A load carries the time at which the page was requested, for comparison with newer events."""
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


def test_pods_may_share_a_metrics_port() -> None:
    """Two concurrent requests to one address both succeed, and one connection is kept."""

    async def get() -> tuple[list[tuple[int, bytes]], int]:
        async with serving(well) as (pod, address):
            http = HttpGetter(timeout_s=60.0)
            answers = [*await asyncio.gather(http.get(address, "/metrics"), http.get(address, "/v1/models"))]
            answers.append(await http.get(address, "/metrics"))
            http.close()
        return answers, pod.connections

    answers, connections = asyncio.run(get())
    assert answers == [(200, PAGE), (200, MODELS), (200, PAGE)]
    assert connections == 2
