"""Stand-in for an engine's event publisher: PUB and replay ROUTER in vLLM's protocol, on real sockets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import msgspec
import zmq

from tests.support.loopback import free_port

END = b"\xff" * 8
DEADLINE_S = 300.0


def wait_until(what: str, condition: Callable[[], bool]) -> None:
    """Wait for a condition; fail with its name after a generous deadline."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not in {DEADLINE_S} s: {what}")
        time.sleep(0.005)


def stored(
    hashes: Sequence[int],
    tokens: Sequence[int],
    parent: int | None = None,
    block_size: int = 4,
    **fields: object,
) -> dict[str, object]:
    """Return a BlockStored event in the map layout."""
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": block_size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        **fields,
    }


def removed(hashes: Sequence[int]) -> dict[str, object]:
    """Return a BlockRemoved event in the map layout."""
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"}


def batch(*events: object, ts: float | None = None, rank: int | None = 0) -> bytes:
    """Return the payload of a batch."""
    return msgspec.msgpack.encode([time.time() if ts is None else ts, list(events), rank])


class EnginePublisher:
    """Publisher of one engine process.

    Args:
        ports: Ports to bind, as (events, replay); None for free ports.
        replay: Whether there is a replay socket.
        history: Number of batches kept for replays.
        topic_frame: Whether replay answers have a topic frame, as since vLLM 0.28.
    """

    def __init__(
        self,
        ports: tuple[int, int] | None = None,
        *,
        replay: bool = True,
        history: int = 10_000,
        topic_frame: bool = True,
    ) -> None:
        self._context = zmq.Context()
        self._history_cap = history
        self._topic_frame = topic_frame
        self._lock = threading.Lock()
        self._history: list[tuple[int, bytes]] = []
        self._sequence = 0
        self._closing = False
        # Number of replies after which replays stall, and number of replays that do.
        self.silent_after: int | None = None
        self.silent_replays = 1
        # Extra frames before each replay's replies.
        self.garbage_answers: list[list[bytes]] = []
        self._router: zmq.Socket[bytes] | None = None
        self.replay_port = 0
        try:
            self.events_port = ports[0] if ports else free_port()
            self._pub = self._bound(zmq.XPUB, self.events_port)
            if replay:
                self.replay_port = ports[1] if ports else free_port()
                self._router = self._bound(zmq.ROUTER, self.replay_port)
        except zmq.ZMQError:
            self._context.destroy()
            raise
        self._thread = threading.Thread(target=self._serve, daemon=True)
        if replay:
            self._thread.start()

    @property
    def ports(self) -> tuple[int, int]:
        """Ports for the next process of the same engine."""
        return self.events_port, self.replay_port

    @property
    def events_endpoint(self) -> str:
        """Endpoint for subscriptions."""
        return f"tcp://127.0.0.1:{self.events_port}"

    @property
    def replay_endpoint(self) -> str | None:
        """Endpoint for replay requests."""
        return f"tcp://127.0.0.1:{self.replay_port}" if self._router else None

    def wait_for_subscriber(self) -> None:
        """Wait until a subscription has taken effect."""
        assert self._pub.poll(DEADLINE_S * 1000), "nobody subscribed"
        self._pub.recv()

    def publish(self, *events: object, lost: bool = False, forgotten: bool = False) -> int:
        """Publish a batch.

        Args:
            events: Events of the batch.
            lost: Do not send the batch to subscribers.
            forgotten: Do not keep the batch for replays.

        Returns:
            The batch's sequence number.
        """
        return self.publish_payload(batch(*events), lost=lost, forgotten=forgotten)

    def publish_payload(self, payload: bytes, *, lost: bool = False, forgotten: bool = False) -> int:
        """Publish raw bytes as a batch."""
        sequence, self._sequence = self._sequence, self._sequence + 1
        if not forgotten:
            with self._lock:
                self._history = [*self._history, (sequence, payload)][-self._history_cap :]
        if not lost:
            self.send_frames([b"kv@pod@model", sequence.to_bytes(8, "big"), payload])
        return sequence

    def send_frames(self, frames: list[bytes]) -> None:
        """Send an arbitrary message to the subscribers."""
        self._pub.send_multipart(frames)

    def flush(self) -> None:
        """Wait until all batches are handed to the subscribers' connections."""
        with self._context.socket(zmq.SUB) as probe:
            probe.subscribe("probe")
            probe.connect(self.events_endpoint)
            self.wait_for_subscriber()
            self._pub.send(b"probe")
            assert probe.poll(DEADLINE_S * 1000)

    def cut_links(self) -> None:
        """Close the connections of all subscribers; the process continues."""
        self._pub.close()
        self._pub = self._bound(zmq.XPUB, self.events_port)

    def close(self) -> None:
        """End the engine's process without notice."""
        if self._closing:
            return
        self._closing = True
        if self._thread.is_alive():
            self._thread.join()
        if self._router is not None:
            self._router.close()
        self._pub.close()
        self._context.term()

    def __enter__(self) -> EnginePublisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _bound(self, kind: int, port: int) -> zmq.Socket[bytes]:
        """Return a socket bound to a port, waiting for its last owner if needed."""
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.sndhwm = 100_000
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            try:
                socket.bind(f"tcp://127.0.0.1:{port}")
                return socket
            except zmq.ZMQError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.01)

    def _serve(self) -> None:
        assert self._router is not None
        while not self._closing:
            if not self._router.poll(10):
                continue
            client, empty, start = self._router.recv_multipart()
            assert empty == b""
            with self._lock:
                history = self._history
            topic, no_topic = ([b"kv@pod@model"], [b""]) if self._topic_frame else ([], [])
            for frames in self.garbage_answers:
                self._router.send_multipart([client, *frames])
            asked = [batch for batch in history if batch[0] >= int.from_bytes(start, "big")]
            silent = self.silent_after is not None and self.silent_replays > 0
            for sequence, payload in asked[: self.silent_after if silent else None]:
                self._router.send_multipart([client, b"", *topic, sequence.to_bytes(8, "big"), payload])
            if silent:
                self.silent_replays -= 1
                continue
            self._router.send_multipart([client, b"", *no_topic, END, b""])
