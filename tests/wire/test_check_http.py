"""ext_authz over plain HTTP on real sockets: what Envoy is answered, and that nobody can harm it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router import http_connection
from router.check_http import CheckHttpDoor
from router.gateway_pick import GatewayPick
from router.http_listen import HttpServer
from router.steps import MAY_WAIT, Steps
from tests.unit.router_support import TINY, Bench, long_text, ready_pod
from tests.wire.raw_http_support import Answer, Client
from tests.wire.router_wire_support import TIMEOUT_S, wait_until

A, B = ready_pod("10.0.0.1:8000"), ready_pod("10.0.0.2:8000")
TEXT = long_text(200)
BODY = json.dumps({"model": TINY, "prompt": TEXT}).encode()
DESTINATION = "x-gateway-destination-endpoint"


@contextmanager
def served(
    bench: Bench, *, max_request_bytes: int = 8 << 20, connections_max: int = 64
) -> Iterator[HttpServer]:
    """A bench's door on a free port."""
    gateway = GatewayPick(bench.router, bench.metrics)
    door = CheckHttpDoor(gateway, bench.metrics, max_request_bytes)
    server = door.listen(
        "--check-port", "127.0.0.1", 0, inline_bytes_max=64 << 10, connections_max=connections_max
    )
    server.start()
    try:
        yield server
    finally:
        server.close()


def request(body: bytes = BODY, path: str = "/v1/completions", method: str = "POST", **headers: str) -> bytes:
    """A request as Envoy makes it; underscores in header names are hyphens."""
    given = {"host": "gateway", "content-length": str(len(body)), "x-request-id": "r"}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items())]
    return "\r\n".join(lines).encode("utf-8") + b"\r\n\r\n" + body


def ask(server: HttpServer, data: bytes) -> Answer:
    """One request on a connection of its own."""
    with Client(server.port) as client:
        client.send(data)
        return client.answer()


def test_a_request_gets_the_pod_with_its_prefix() -> None:
    """The destination comes as a header, on a connection that stays open for the next request."""
    bench = Bench().with_pods(A, B)
    bench.index.hold(B.address, bench.keys(TEXT))
    with served(bench) as server, Client(server.port) as client:
        for _ in range(3):
            client.send(request())
            answer = client.answer()
            assert (answer.status, answer.body) == (200, b"")
            assert answer.headers == {DESTINATION: B.address, "content-length": "0"}
    record = bench.explain.one("r")
    assert record is not None
    assert record["degraded"] is None


def test_a_body_that_comes_in_pieces_is_read_whole() -> None:
    """However a request is cut on its way, large or chunked, the pick is for all of it."""
    bench = Bench().with_pods(A, B)
    text = long_text(20_000)
    body = json.dumps({"model": TINY, "prompt": text}).encode()
    bench.index.hold(B.address, bench.keys(text))
    chunks = [body[start : start + 5000] for start in range(0, len(body), 5000)]
    chunked = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-id: r\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    with served(bench) as server:
        for data in (request(body), head + chunked):
            for cuts in ([60], [len(data) // 2], [100, 70_000, len(data) - 1]):
                with Client(server.port) as client:
                    for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
                        client.send(data[start:end])
                    assert client.answer().headers[DESTINATION] == B.address


def test_pipelined_requests_are_answered_in_their_order() -> None:
    """Several requests that come at once get an answer each, also behind a large body."""
    with served(Bench().with_pods(A)) as server, Client(server.port) as client:
        unknown = json.dumps({"model": "gpt-9", "prompt": "hi"}).encode()
        client.send(request() + request(unknown) + request(b" " * 200_000, "/tokenize"))
        client.send(request())
        assert [client.answer().status for _ in range(4)] == [200, 404, 200, 200]


def test_control_headers_are_named_for_removal_and_a_missing_id_is_made() -> None:
    """Envoy is told to take off a client's control headers, and to set an id where there was none."""
    bench = Bench().with_pods(A)
    with served(bench) as server:
        answer = ask(server, request(x_llm_d_inference_objective="mine", x_request_id="", hi="mom"))
    assert answer.headers["x-envoy-auth-headers-to-remove"] == "x-llm-d-inference-objective"
    assert bench.explain.one(answer.headers["x-request-id"]) is not None


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        (B.address, {B.address}),
        (f'["{B.address}", "10.0.0.9:8000"]', {B.address}),
        ("[7]", {None}),
    ],
)
def test_the_gateways_subset_is_obeyed(hint: str, expected: set[str | None]) -> None:
    """Only pods that the gateway names are picked; a hint that cannot be read allows nobody."""
    with served(Bench().with_pods(A, B)) as server:
        data = request(x_gateway_destination_endpoint_subset=hint)
        assert {ask(server, data).headers.get(DESTINATION) for _ in range(8)} == expected


@pytest.mark.parametrize(
    ("data", "status", "param"),
    [
        (request(b"{nonsense"), 400, None),
        (request(b'{"model": 7}'), 400, "model"),
        (request(json.dumps({"model": "gpt-9", "prompt": "hi"}).encode()), 404, "model"),
        (request(b" " * 5000), 413, None),
        (b"NONSENSE\r\n\r\n", 400, None),
        (request(b"", long="a" * 200_000), 431, None),
        (request(b"", content_length="nine"), 400, None),
        (request(b"", transfer_encoding="chunked") + b"zz\r\n", 400, None),
    ],
)
def test_errors_are_answered_in_openais_form(data: bytes, status: int, param: str | None) -> None:
    """Each error has its status and a JSON body, and is counted."""
    bench = Bench().with_pods(A)
    with served(bench, max_request_bytes=4096) as server:
        answer = ask(server, data)
    error = json.loads(answer.body)["error"]
    assert (answer.status, error["code"], error["param"]) == (status, status, param)
    assert answer.headers["content-type"] == "application/json"
    labels = {"model_name": "", "target_model_name": "", "fairness_id": "", "priority": "0"}
    assert bench.sample("llm_d_epp_request_error_total", **labels, error_code=error["type"])


def test_no_pod_is_told_with_a_stand_in_for_503() -> None:
    """Envoy would forget what comes with a 503; the body names the true status, the header the reason."""
    with served(Bench()) as server:
        answer = ask(server, request())
    assert (answer.status, json.loads(answer.body)["error"]["code"]) == (473, 503)
    assert answer.headers["x-llm-d-request-dropped-reason"] == "rejected-no-endpoints"


def test_an_answer_to_head_has_no_body() -> None:
    """A refused HEAD leaves nothing on the connection that could be taken for the next answer."""
    with served(Bench()) as server, Client(server.port) as client:
        client.send(request(b"", method="HEAD") + request())
        head = b""
        while head.count(b"HTTP/1.1 473") < 2 or not head.endswith(b"}"):
            head += client.socket.recv(65536)
    assert head.count(b'{"error"') == 1


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.0\r\n\r\n",
        request(b"", connection="close"),
        request(b" " * 200_000, "/tokenize", connection="close"),
        request(b"", upgrade="websocket", connection="upgrade"),
    ],
)
def test_whoever_ends_with_its_request_is_closed_on(data: bytes) -> None:
    """HTTP/1.0, `connection: close` and an upgrade are answered, and then the connection ends."""
    with served(Bench().with_pods(A)) as server, Client(server.port) as client:
        client.send(data)
        assert client.answer().headers["connection"] == "close"
        assert client.is_closed()


def test_a_draining_server_answers_and_closes() -> None:
    """From then on each answer ends its connection, and a closed server's idle ones end at once."""
    with served(Bench().with_pods(A)) as server, Client(server.port) as busy, Client(server.port) as idle:
        busy.send(request())
        assert "connection" not in busy.answer().headers
        idle.send(request())
        idle.answer()
        server.drain()
        busy.send(request())
        assert busy.answer().headers["connection"] == "close"
        assert busy.is_closed()
        server.close()
        assert idle.is_closed()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port))


def test_an_answer_that_is_being_made_survives_the_close() -> None:
    """Closing waits for the requests inside."""
    entered, may_go = threading.Event(), threading.Event()

    def slow(*_: object) -> Steps[bytes]:
        yield MAY_WAIT
        entered.set()
        may_go.wait(TIMEOUT_S)
        return b"HTTP/1.1 200 -\r\ncontent-length: 0\r\n\r\n"

    server = HttpServer(
        "X",
        "127.0.0.1",
        0,
        slow,
        lambda _: b"",
        body_bytes_max=9,
        inline_bytes_max=9,
        connections_max=2,
        refused=lambda: None,
    )
    server.start()
    with Client(server.port) as client:
        client.send(request(b""))
        assert entered.wait(TIMEOUT_S)
        closing = threading.Thread(target=server.close)
        closing.start()
        may_go.set()
        assert client.answer().status == 200
        closing.join()


def test_connections_beyond_the_limit_are_closed_and_counted() -> None:
    """What is open goes on, and a place that is free again is given away."""
    bench = Bench().with_pods(A)
    with served(bench, connections_max=1) as server:
        with Client(server.port) as first:
            first.send(request())
            first.answer()
            with Client(server.port) as second:
                assert second.is_closed()
            first.send(request())
            assert first.answer().status == 200
        dropped = {"door": "check_http", "reason": "too_many_connections"}
        assert bench.sample("kvroute_router_dropped_messages_total", **dropped) == 1

        def is_free() -> bool:
            with Client(server.port) as client:
                try:
                    client.send(request())
                    return client.answer().status == 200
                except (AssertionError, OSError):
                    return False

        wait_until(is_free, "a free place")


@pytest.mark.parametrize("sent", [b"POST / HT", request()[:-5]], ids=["in the head", "in the body"])
def test_whoever_stops_in_the_middle_is_told_and_closed_on(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that does not come to its end in time holds no thread for ever."""
    monkeypatch.setattr(http_connection, "_REQUEST_S", 1.0)
    with served(Bench().with_pods(A)) as server, Client(server.port) as client:
        client.send(sent)
        assert client.answer().status == 408
        assert client.is_closed()


def test_whoever_trickles_is_told_and_closed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then does not keep a request alive."""
    monkeypatch.setattr(http_connection, "_REQUEST_S", 1.0)
    with served(Bench().with_pods(A)) as server, Client(server.port) as client:
        stop = threading.Event()

        def trickle() -> None:
            client.send(b"POST / HTTP/1.1\r\nx: ")
            while not stop.wait(0.1):
                try:
                    client.send(b"a")
                except OSError:
                    return

        sender = threading.Thread(target=trickle)
        sender.start()
        try:
            assert client.answer().status == 408
        finally:
            stop.set()
            sender.join()


def test_an_idle_connection_ends_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections on which nothing is asked make room."""
    monkeypatch.setattr(http_connection, "_REQUEST_S", 1.0)
    monkeypatch.setattr(http_connection, "_IDLE_S", 1.0)
    with served(Bench().with_pods(A)) as server, Client(server.port) as client:
        client.send(request())
        assert client.answer().status == 200
        assert client.is_closed()


def test_half_closed_and_reset_connections_end_alone() -> None:
    """A client that goes away in the middle disturbs nobody else."""
    with served(Bench().with_pods(A)) as server, Client(server.port) as other:
        for sent in (b"", b"POST / HT", request()[:-5], request()):
            with Client(server.port) as client:
                client.send(sent)
                client.socket.shutdown(socket.SHUT_WR)
                if sent == request():
                    assert client.answer().status == 200
                assert client.is_closed()
        other.send(request())
        assert other.answer().status == 200


def test_hostile_bytes_are_answered_or_closed_on() -> None:
    """Whatever comes, the server answers HTTP or closes, and serves the next client."""
    pieces = st.one_of(
        st.binary(max_size=40),
        st.sampled_from(
            [
                b"POST /v1/completions HTTP/1.1\r\n",
                b"GET / HTTP/1.1\r\n",
                b"content-length: 5\r\n",
                b"content-length: 99999999999999999999\r\n",
                b"transfer-encoding: chunked\r\n",
                b"connection: upgrade\r\nupgrade: h2c\r\n",
                b"x-request-id: caf\xc3\xa9\r\n",
                b"\r\n",
                b"5\r\nhello\r\n",
                b"0\r\n\r\n",
                b'{"model": "kvroute-tiny", "prompt": "hi"}',
            ]
        ),
    )
    with served(Bench().with_pods(A), max_request_bytes=1000) as server:

        @settings(suppress_health_check=[HealthCheck.too_slow], max_examples=150, deadline=None)
        @given(st.lists(pieces, max_size=8))
        def try_out(parts: list[bytes]) -> None:
            with Client(server.port) as client:
                received = b""
                try:
                    client.send(b"".join(parts))
                    client.socket.shutdown(socket.SHUT_WR)
                    while data := client.socket.recv(65536):
                        received += data
                except (BrokenPipeError, ConnectionResetError):
                    pass
            assert received[:9] in (b"", b"HTTP/1.1 ")

        try_out()
        assert ask(server, request()).status == 200
