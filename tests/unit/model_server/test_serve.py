"""model_server.openai.api_server: reserving an address before the model is loaded."""

from __future__ import annotations

import socket

import pytest

from model_server.errors import StartError
from model_server.openai.api_server import reserve


def test_a_reserved_port_refuses_connections_until_it_listens() -> None:
    """While the model loads, clients are refused; then they are accepted."""
    with reserve("127.0.0.1", 0) as listener:
        address = listener.getsockname()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        listener.listen()
        socket.create_connection(address).close()


def test_a_port_in_use_is_rejected() -> None:
    """The error of an address in use names the address."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with (
            pytest.raises(StartError, match=f"cannot listen on 127.0.0.1:{port}"),
            reserve("127.0.0.1", port),
        ):
            pass


def test_a_port_can_be_taken_again_right_after_use() -> None:
    """Lingering connections of an earlier process do not block a restart on its port."""
    with socket.create_server(("127.0.0.1", 0)) as earlier:
        address = earlier.getsockname()
        client = socket.create_connection(address)
        accepted, _ = earlier.accept()
        accepted.close()
        client.close()
    with reserve(*address) as listener:
        assert listener.getsockname() == address


def test_an_unknown_host_is_reported() -> None:
    """A host that cannot be resolved or is not local stops the start."""
    with pytest.raises(StartError, match=r"192\.0\.2\.1"), reserve("192.0.2.1", 0):
        pass
