"""The connection to one pod's publisher: a SUB socket and the monitor that tells when it is connected.

One object is one connection at most: when it is lost, whatever is still queued belongs to a life that may
be over, so the whole socket is thrown away and a new one opened.
"""

from __future__ import annotations

from enum import Enum

import zmq
from zmq.utils.monitor import recv_monitor_message

from indexer.replay import Batch, Broken, parse_live

_READABLE = int(zmq.POLLIN)
# Messages that wait unread cost memory, each as much as a message may have; the rest waits at the publisher.
_RECEIVE_QUEUE = 8
_HEARTBEAT_MS = 2000
_HEARTBEAT_TIMEOUT_MS = 6000
_RECONNECT_MS = 100
_RECONNECT_MAX_MS = 1000
_CONNECT_TIMEOUT_MS = 3000


class LinkEvent(Enum):
    """What the monitor tells."""

    UP = "up"
    DOWN = "down"


class Link:
    """A subscription to one publisher.

    Args:
        context: Where its sockets are made.
        endpoint: The publisher's address.
        topic_prefix: What to subscribe to; empty for all. Topics say nothing that we use.
        max_message_bytes: Above it the connection is cut.

    Raises:
        zmq.ZMQError: The endpoint is unusable.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        *,
        topic_prefix: str,
        max_message_bytes: int,
    ) -> None:
        self.socket = context.socket(zmq.SUB)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        limit(self.socket, endpoint, max_message_bytes)
        self.socket.subscribe(topic_prefix)
        try:
            self.socket.connect(endpoint)
        except zmq.ZMQError:
            self.close()
            raise

    def next_event(self) -> LinkEvent | None:
        """The next change of the connection; None when there is none."""
        try:
            message = recv_monitor_message(self.monitor, zmq.NOBLOCK)
        except zmq.Again:
            return None
        return LinkEvent.UP if message["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED else LinkEvent.DOWN

    @property
    def waiting(self) -> bool:
        """Whether a message is there: to ask costs a tenth of a `receive` that finds none."""
        return bool(int(self.socket.getsockopt(zmq.EVENTS)) & _READABLE)

    def receive(self) -> Batch | Broken | None:
        """The next message; None when none is there."""
        try:
            return parse_live(self.socket.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            return None

    def close(self) -> None:
        """Ends the subscription."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close()


def limit(subscriber: zmq.Socket[bytes], endpoint: str, max_message_bytes: int) -> None:
    """Bounds what a SUB socket takes, and how long it believes in a silent peer."""
    options = {
        zmq.LINGER: 0,
        zmq.RCVHWM: _RECEIVE_QUEUE,
        zmq.MAXMSGSIZE: max_message_bytes,
        zmq.HEARTBEAT_IVL: _HEARTBEAT_MS,
        zmq.HEARTBEAT_TIMEOUT: _HEARTBEAT_TIMEOUT_MS,
        zmq.RECONNECT_IVL: _RECONNECT_MS,
        zmq.RECONNECT_IVL_MAX: _RECONNECT_MAX_MS,
        zmq.CONNECT_TIMEOUT: _CONNECT_TIMEOUT_MS,
        zmq.IPV6: "[" in endpoint,
    }
    for option, value in options.items():
        subscriber.setsockopt(option, value)
