"""Engines that connect to the indexer's socket, in vLLM's protocol."""

from __future__ import annotations

import zmq

from indexer.config import PodStream
from tests.support.indexer.engine_publisher import DEADLINE_S, batch, wait_until
from tests.support.indexer.subscriber import MODEL, Watched


class ConnectedEngine:
    """PUB socket that connects to a running indexer, with a context of its own.

    Args:
        inbox: Indexer, or the address that it is bound to.
        pod: Name of the pod in the topic.
        model: Name of the model in the topic.
        first: First sequence number.
    """

    def __init__(self, inbox: Watched | str, pod: str, model: str = MODEL, first: int = 0) -> None:
        endpoint = inbox if isinstance(inbox, str) else inbox.indexer.bound_endpoint
        assert endpoint is not None
        self.sequence = first
        self._topic = f"kv@{pod}@{model}".encode()
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.XPUB)
        self._pub.linger = 0
        self._pub.connect(endpoint)
        assert self._pub.poll(DEADLINE_S * 1000), "nobody subscribed"
        self._pub.recv()

    def publish(self, *events: object, rank: int | None = None, lost: bool = False) -> None:
        """Publish a batch."""
        payload = batch(*events, rank=rank)
        if not lost:
            self.send(self._topic, self.sequence.to_bytes(8, "big"), payload)
        self.sequence += 1

    def send(self, *frames: bytes) -> None:
        """Send any message."""
        self._pub.send_multipart(frames)

    def close(self) -> None:
        """Close the socket without a notice."""
        self._pub.close()
        self._context.term()

    def __enter__(self) -> ConnectedEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def declared(pod: str, model: str = MODEL, **settings: object) -> PodStream:
    """Return the stream of a pod that connects to us."""
    return PodStream(pod, model, None, **settings)  # type: ignore[arg-type]


def reason(watched: Watched, holder: str) -> str:
    """Return the reason of the stream's state."""
    return watched.indexer.engine_registry.engines[holder].reason


def known(watched: Watched, *holders: str) -> None:
    """Wait until exactly these engines are followed."""
    wait_until(f"{holders} are known", lambda: set(watched.indexer.engine_registry.engines) == set(holders))
