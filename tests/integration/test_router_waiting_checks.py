"""ext_authz over plain HTTP where requests wait for their turn: the one thread that serves them does not."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.integration.hermetic_support import DATA, pod, scene, waiting
from tests.loopback import free_port
from tests.wire.raw_http_support import Client
from tests.wire.router_wire_support import wait_until

_CASE: dict[str, Any] = {"config": DATA["configs"]["flow-control-concurrency-1"], "pods": [pod(0)]}
_WAITING = 20


def asked(name: str, body: bytes = b'{"model": "m", "prompt": "p"}') -> bytes:
    """A request as Envoy makes it."""
    head = f"POST /v1/completions HTTP/1.1\r\nx-request-id: {name}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def test_requests_in_a_queue_hold_up_nobody(tmp_path: Path) -> None:
    """While a full pool keeps many waiting, what needs no pod is answered, and in the end they are, too."""
    with scene(_CASE, tmp_path, "--check-port", str(free_port())) as played, ExitStack() as opened:
        port = played.router.ports["check"]
        first, other = opened.enter_context(Client(port)), opened.enter_context(Client(port))
        first.send(asked("first"))
        assert first.answer().headers["x-gateway-destination-endpoint"] == played.pods[0].address
        clients = [opened.enter_context(Client(port)) for _ in range(_WAITING)]
        for number, client in enumerate(clients):
            client.send(asked(f"waiting-{number}"))
        wait_until(lambda: waiting(played) == _WAITING, "the queue")
        for _ in range(3):
            other.send(asked("wrong", b"{nonsense"))
            assert other.answer().status == 400
        played.router.close()
        assert {json.loads(client.answer().body)["error"]["code"] for client in clients} == {503}
