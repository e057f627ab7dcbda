"""Closed-loop HTTP load from a process of its own: a URL and request bodies in, one JSON object out.

`python -m benchmarks.load URL BODIES CLIENTS SECONDS [repeated]`; BODIES is a file with one chat per line.
Clients send the chats in turn, each over one persistent connection: with a new turn appended each time, or
unchanged (`repeated`). It uses little CPU, because it shares the machine with the measured programs.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import uvloop

from benchmarks.next_turns import next_turns

_PATH = "/v1/chat/completions"


class _Client(asyncio.Protocol):
    """One connection in a closed loop: it sends the next request once the previous response is complete."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._transport: asyncio.Transport
        self._received = b""
        self._sent_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._send()

    def data_received(self, data: bytes) -> None:
        self._received = self._received + data if self._received else data
        self._load.reads += 1
        if not _is_complete(self._received):
            return
        self._load.answered(self._received, time.perf_counter() - self._sent_s)
        self._received = b""
        self._send()

    def connection_lost(self, _error: Exception | None) -> None:
        if not self._load.is_over:
            self._load.errors += 1
        self._load.closed()

    def _send(self) -> None:
        if self._load.is_over:
            self._transport.close()
            return
        self._sent_s = time.perf_counter()
        self._transport.write(next(self._load.requests))


class Load:
    """One period of load.

    Attributes:
        requests: Endless iterator of complete requests.
        is_over: Whether clients stop.
        errors: Responses other than 200, and lost connections.
        reads: Number of reads in which responses arrived.
    """

    def __init__(self, url: str, bodies: Iterator[bytes], clients: int) -> None:
        netloc = urlsplit(url).netloc
        head = f"POST {_PATH} HTTP/1.1\r\nhost: {netloc}\r\ncontent-type: application/json\r\n"
        begun = f"{head}content-length: ".encode()
        self.requests = (b"%b%d\r\n\r\n%b" % (begun, len(body), body) for body in bodies)
        self.is_over = False
        self.errors = 0
        self.reads = 0
        self._times_s: list[float] = []
        self._bytes = 0
        self._open = clients
        self._ended = asyncio.get_running_loop().create_future()
        host, _, port = netloc.rpartition(":")
        self._address = (host, int(port))

    async def run(self, seconds: float) -> dict[str, float]:
        """Run the clients; return their results."""
        loop = asyncio.get_running_loop()
        started_s = time.perf_counter()
        for _ in range(self._open):
            await loop.create_connection(lambda: _Client(self), *self._address)
        await asyncio.sleep(seconds)
        self.is_over = True
        took_s = time.perf_counter() - started_s
        answered = len(self._times_s)
        await asyncio.wait_for(self._ended, 30)
        times = sorted(self._times_s)
        return {
            "requests": len(times),
            "per_s": answered / took_s,
            "p50_ms": 1000 * times[len(times) // 2] if times else 0.0,
            "p99_ms": 1000 * times[len(times) * 99 // 100] if times else 0.0,
            "errors": self.errors,
            "bytes": self._bytes,
            "reads": self.reads / max(1, len(times)),
            "client_cpu_s": time.process_time(),
        }

    def answered(self, answer: bytes, took_s: float) -> None:
        """Record a complete response."""
        self._times_s.append(took_s)
        self._bytes += len(answer)
        self.errors += answer[9:12] != b"200"

    def closed(self) -> None:
        """Record that a client has disconnected."""
        self._open -= 1
        if not self._open and not self._ended.done():
            self._ended.set_result(None)


def _is_complete(received: bytes) -> bool:
    head_end = received.find(b"\r\n\r\n") + 4
    if head_end < 4:
        return False
    _, found, rest = received[:head_end].lower().partition(b"\r\ncontent-length: ")
    if found:
        return len(received) >= head_end + int(rest.split(b"\r\n", 1)[0])
    return received.endswith(b"0\r\n\r\n")


async def main(url: str, bodies: Path, clients: int, seconds: float, *, repeated: bool) -> None:
    """Run one period of load and print its result."""
    chats = bodies.read_bytes().splitlines()
    load = Load(url, cycle(chats) if repeated else next_turns(chats), clients)
    print(json.dumps(await load.run(seconds)), flush=True)


if __name__ == "__main__":
    repeated = sys.argv[5:] == ["repeated"]
    uvloop.run(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), repeated=repeated))
