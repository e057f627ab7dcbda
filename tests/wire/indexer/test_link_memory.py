"""Messages queued at a subscriber's socket when a publisher sends large ones without end."""

from __future__ import annotations

import time

import zmq

from indexer.streams.dialled import close_subscription, subscription
from tests.support.indexer.engine_publisher import wait_until

MESSAGE_BYTES = 1 << 20
SENT = 200


def test_few_messages_wait_at_the_socket() -> None:
    """Of many large unread messages only a few are taken from the publisher."""
    with zmq.Context() as ours, zmq.Context() as theirs:
        publisher = theirs.socket(zmq.PUB)
        publisher.setsockopt(zmq.LINGER, 0)
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        endpoint = f"tcp://127.0.0.1:{port}"
        link = subscription(ours, endpoint, "", 4 * MESSAGE_BYTES)
        monitor = link.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        link.connect(endpoint)
        try:
            wait_until("connected", lambda: bool(monitor.poll(0)))
            for sequence in range(SENT):
                publisher.send_multipart([b"", sequence.to_bytes(8, "big"), bytes(MESSAGE_BYTES)])
            wait_until("the first message", lambda: bool(link.poll(0)))
            # Let the sockets' threads deliver messages; the rest goes with the publisher.
            time.sleep(3)
            publisher.close()
            received = 0
            while link.poll(1000):
                link.recv_multipart()
                received += 1
        finally:
            publisher.close()
            close_subscription(link, monitor)
    # Eight messages at the socket, and those in the kernel's buffers.
    assert 1 <= received <= 60
