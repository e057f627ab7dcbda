"""The chart's scripts: draining of model servers, and the conversation of `helm test`."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.support.chart.helm import CHART
from tests.support.loopback import HERE
from tests.support.router.server import METRICS, FakePod

CONVERSATION = CHART / "files" / "conversation.py"
DRAIN = CHART / "files" / "drain_model_server.py"


@pytest.mark.parametrize("busy", ["running", "waiting"])
def test_a_model_server_drains_until_its_last_request(busy: str) -> None:
    """The preStop script waits as long as requests run or are queued, and no longer."""
    pod = FakePod()
    count = f'vllm:num_requests_{busy}{{engine="0"}} '
    pod.metrics = METRICS.replace(f"{count}0.0", f"{count}1.0")
    with subprocess.Popen([sys.executable, DRAIN, str(pod.port), "0", "1000"]) as drain:
        with pytest.raises(subprocess.TimeoutExpired):
            drain.wait(3)
        pod.metrics = METRICS
        assert drain.wait(300) == 0
    pod.stop()


def test_a_model_server_with_a_failing_page_is_not_considered_idle() -> None:
    """While a busy server's metrics page fails, the script retries instead of ending."""
    with socket.create_server((HERE, 0)) as busy:
        busy.settimeout(300)
        with subprocess.Popen([sys.executable, DRAIN, str(busy.getsockname()[1]), "0", "1000"]) as drain:
            for _ in range(3):
                busy.accept()[0].close()
            connection, _ = busy.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + METRICS.encode())
            assert drain.wait(300) == 0


def test_draining_a_model_server_ends_at_its_limit() -> None:
    """The script ends at its time limit and when the server is gone."""
    pod = FakePod()
    pod.metrics = METRICS.replace('running{engine="0"} 0.0', 'running{engine="0"} 3.0')
    assert subprocess.run([sys.executable, DRAIN, str(pod.port), "0", "1"], timeout=300).returncode == 0
    pod.stop()
    assert subprocess.run([sys.executable, DRAIN, str(pod.port), "0", "1000"], timeout=300).returncode == 0


@pytest.mark.parametrize(
    ("pods", "cached", "failures", "passes", "says"),
    [
        (["a", "a", "a"], [0, 64, 128], 2, True, "the conversation stuck"),
        ([None, None, None], [0, 64, 128], 0, True, "the conversation stuck"),
        (["a", "b", "a"], [0, 64, 128], 0, False, "it moved between model servers: a, b, a"),
        (["a", "a", "a"], [0, 0, 128], 0, False, "met an empty cache"),
        (["a", "a", "a"], [0, None, None], 0, False, "met an empty cache"),
    ],
)
def test_the_conversation_passes_only_on_one_pod(
    pods: list[str | None], cached: list[int | None], failures: int, passes: bool, says: str
) -> None:
    """The test passes if one pod served all turns from its cache, by the header or else by cached tokens."""
    with _gateway(pods, cached, failures=failures) as (url, seen):
        done = _conversation(url)
    assert (done.returncode == 0) is passes, done.stdout + done.stderr
    assert says in done.stdout
    assert [len(body["messages"]) for body in seen] == [1, 3, 5]
    assert seen[2]["messages"][:3] == seen[1]["messages"]


def test_the_conversation_prints_what_it_waits_for() -> None:
    """Each problem is printed at once, even if output is not a terminal."""
    with socket.create_server((HERE, 0)) as full:
        # The port of a gateway that accepts connections and never responds.
        url = f"http://{HERE}:{full.getsockname()[1]}"
        command = [sys.executable, CONVERSATION, url, "m", "1000"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as talk:
            assert talk.stdout is not None
            try:
                assert url in talk.stdout.readline()
                full.accept()[0].close()
                assert talk.stdout.readline().startswith("waiting for ")
            finally:
                talk.kill()


@pytest.mark.parametrize(
    ("url", "says"),
    [("", "test.url"), ("http://a!b", "no such host"), (f"http://{HERE}:1", "no answer in time")],
)
def test_the_conversation_fails_with_a_reason(url: str, says: str) -> None:
    """The test fails with a reason; a missing or unknown address fails without waiting."""
    done = _conversation(url, timeout_s=3.0 if HERE in url else 200.0)
    assert done.returncode == 1
    assert says in done.stdout + done.stderr


def _conversation(url: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, CONVERSATION, url, "m", str(timeout_s)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@contextmanager
def _gateway(
    pods: list[str | None], cached: list[int | None], failures: int
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Run a gateway with the given responses, after this many 503s."""
    seen: list[dict[str, Any]] = []
    left = [failures]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if left[0]:
                left[0] -= 1
                self.send_error(503)
                return
            turn = len(seen)
            seen.append(body)
            details = {} if cached[turn] is None else {"cached_tokens": cached[turn]}
            answer = {
                "choices": [{"message": {"role": "assistant", "content": "yes"}}],
                "usage": {"prompt_tokens": 200, "prompt_tokens_details": details or None},
            }
            self.send_response(200)
            if pods[turn] is not None:
                self.send_header("x-kvroute-pod", str(pods[turn]))
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()
