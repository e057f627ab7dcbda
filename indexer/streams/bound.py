"""Bound SUB socket that engines connect to, and one stream for each engine that publishes there.

The topic, `kv@<pod>@<model>`, and the batch's data-parallel rank identify the engine. A model's name may
contain any characters, '@' and '/' too, so a topic is split at its first two '@' only; pods are "ip:port",
"[ipv6]:port" or any name. libzmq reports the connection of each message and each lost connection, so that a
vanished engine is noticed within its heartbeat timeout. Runs on the subscriber's thread only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import partial
from typing import Annotated, NamedTuple

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from indexer.config import PodStream
from indexer.errors import ListenError, PayloadError
from indexer.streams.actions import Batch
from indexer.streams.dialled import ReplayingStream, close_subscription, parse_live, received, subscription
from indexer.streams.recovery import MESSAGE_FACTOR, StreamThread

_NOBODY = "inbox"
# With the limit of pods reached, undeclared pods are rejected without a check for this time.
_FULL_S = 1.0
_PREFIX = "kv"
_TOPIC_BYTES_MAX = 1024
# Stores that several pods share, `node:NAME` and `pool:NAME`; a host of that name has a port instead.
_SHARED = re.compile(r"(node|pool):(?![0-9]{1,5}$)")


class Topic(NamedTuple):
    """Pod and model that a topic names."""

    pod: str
    model: str


def parse_topic(frame: bytes) -> Topic | None:
    """Parse the topic of a message; return None if it does not name a pod and a model."""
    if len(frame) > _TOPIC_BYTES_MAX:
        return None
    try:
        prefix, pod, model = frame.decode().split("@", 2)
    except ValueError:  # also of a text that is not UTF-8
        return None
    usable = pod and model and pod.isprintable() and "#" not in pod and not pod.isspace()
    return Topic(pod, model) if usable and prefix == _PREFIX else None


class _Ranked(msgspec.Struct, array_like=True):
    ts: msgspec.Raw
    events: msgspec.Raw
    data_parallel_rank: Annotated[int, msgspec.Meta(ge=0, le=65_535)] | None = None


_RANKED = msgspec.msgpack.Decoder(_Ranked)


def batch_rank(payload: bytes) -> int:
    """Return the data-parallel rank of a batch; 0 if the batch names none or cannot be read."""
    try:
        return _RANKED.decode(payload).data_parallel_rank or 0
    except (msgspec.MsgspecError, RecursionError):
        return 0


class Connection(NamedTuple):
    """Identity of one TCP connection."""

    number: int  # its file descriptor, which the system reuses after the connection is lost
    use: int  # number of connections so far with this file descriptor, this one included


class BoundStream(ReplayingStream):
    """Stream of an engine that connects to our socket."""

    connection: Connection | None = None  # connection of the latest message
    lost_s = -math.inf  # time at which the last connection was lost

    def reset(self, now_s: float) -> None:
        super().reset(now_s)
        # The next message reconnects it.
        self.lost(now_s)

    def live_on(self, connection: Connection, batches: list[Batch], now_s: float) -> None:
        if connection != self.connection:
            self.lost(now_s)
            self.connection = connection
            self._set_connected(True, now_s)
        self.live(batches, now_s)

    def lost(self, now_s: float) -> None:
        if self.connection is not None:
            self.connection, self.lost_s = None, now_s
            self._set_connected(False, now_s)


# Stream and connection of a message.
_Source = tuple[BoundStream, Connection]


class BoundSocket:
    """Bound socket and the streams of the engines that publish to it.

    Raises:
        ListenError: The address is in use or not local.
    """

    def __init__(self, subscriber: StreamThread) -> None:
        config = subscriber.config
        assert config.events_bind is not None
        self.name = _NOBODY
        self.publishers: dict[str, BoundStream] = {}  # by `PodStream.holder`; read-only for others
        self._config, self._ingest, self._subscriber = config, subscriber.ingest, subscriber
        self._declared: Mapping[str, PodStream] = {}
        self._elsewhere: frozenset[str] = frozenset()  # pods that we connect to; rejected here
        self._lost: set[Connection] = set()
        # Connections so far, by file descriptor; bounded by the most connections at one time.
        self._uses: dict[int, int] = {}
        self._full_until_s = -math.inf
        limit = MESSAGE_FACTOR * config.max_payload_bytes
        self._socket = subscription(subscriber.context, config.events_bind, config.topic_prefix, limit)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        try:
            self._socket.bind(config.events_bind)
        except zmq.ZMQError as error:
            close_subscription(self._socket, self._monitor)
            raise ListenError(f"events_bind {config.events_bind}: cannot listen: {error.strerror}") from error
        self.endpoint: str = self._socket.get_string(zmq.LAST_ENDPOINT)
        subscriber.watch(self, self._monitor, self._on_monitor)
        subscriber.watch(self, self._socket, self._on_live)

    def _end_lost(self, now_s: float) -> None:
        if self._lost and not self._socket.poll(0):
            for publisher in self.publishers.values():
                if publisher.connection in self._lost:
                    publisher.lost(now_s)
            self._lost.clear()

    def close(self) -> None:
        for publisher in self.publishers.values():
            publisher.close()
        self._subscriber.unwatch(self._monitor)
        self._subscriber.unwatch(self._socket)
        close_subscription(self._socket, self._monitor)

    def reset(self, now_s: float) -> None:
        """Reset all streams: an error outside of a single stream may have affected any of them."""
        for publisher in self.publishers.values():
            publisher.reset(now_s)

    def declare(self, streams: Mapping[str, PodStream], elsewhere: frozenset[str], now_s: float) -> None:
        """Set the declared streams, and the pods whose streams we connect to instead."""
        before, self._declared, self._elsewhere = self._declared, streams, elsewhere
        for holder, publisher in tuple(self.publishers.items()):
            is_other = holder in before or holder in streams or publisher.stream.pod in elsewhere
            # The pod may have connected before it was declared.
            if is_other and streams.get(holder) != publisher.stream:
                self._forget(holder)
        for holder, stream in streams.items():
            if holder not in self.publishers:
                self._open(stream, now_s)

    def _on_monitor(self, now_s: float) -> None:
        self._take_changes()
        self._end_lost(now_s)

    def _take_changes(self) -> None:
        while int(self._monitor.get(zmq.EVENTS)) & zmq.POLLIN:
            message = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            number = message["value"]
            if message["event"] == zmq.EVENT_ACCEPTED:
                self._uses[number] = self._uses.get(number, 0) + 1
            else:
                self._lost.add(Connection(number, self._uses.get(number, 0)))

    def _on_live(self, now_s: float) -> None:
        taken: dict[_Source, list[Batch]] = {}
        for frames in received(self._socket, copy=False):
            # The connection may reuse the file descriptor of one that was just lost.
            self._take_changes()
            self._take(frames, taken, now_s)
        for (publisher, connection), batches in taken.items():
            if self.publishers.get(publisher.name) is publisher:
                self._subscriber.guarded(publisher, partial(publisher.live_on, connection, batches))
        self._end_lost(now_s)

    def _take(self, frames: list[zmq.Frame], taken: dict[_Source, list[Batch]], now_s: float) -> None:
        try:
            message = parse_live([frame.bytes for frame in frames])
            if (topic := parse_topic(frames[0].bytes)) is None:
                raise PayloadError("topic", "it does not name a pod and a model")
            if _SHARED.match(topic.pod) and topic.pod not in self._declared:
                self._ingest.records.shared_store(topic.pod)
                return
            publisher = self._publisher(topic, batch_rank(message.payload), now_s)
        except PayloadError as error:
            self._ingest.records.rejected(_NOBODY, error.reason)
            return
        number = frames[-1].get(zmq.SRCFD)
        connection = Connection(number, self._uses.get(number, 0))
        taken.setdefault((publisher, connection), []).append(message)

    def _stream(self, topic: Topic, rank: int) -> PodStream:
        first = self._config.first_sequence
        stream = PodStream(topic.pod, topic.model, None, first_sequence=first, rank=rank)
        # A pod declared without ranks is one engine, whatever rank its batches name.
        return self._declared.get(stream.holder) or self._declared.get(topic.pod) or stream

    def _publisher(self, topic: Topic, rank: int, now_s: float) -> BoundStream:
        """Return the stream of a message's engine; PayloadError: the message must be rejected."""
        if topic.pod in self._elsewhere:
            raise PayloadError("followed_elsewhere", f"{topic.pod}: this router connects to it")
        stream = self._stream(topic, rank)
        publisher = self.publishers.get(stream.holder)
        if publisher is None and not self._admit(stream, now_s):
            raise PayloadError("too_many_pods", f"{topic.pod}: no room for another undeclared pod")
        if publisher is not None and publisher.stream.model != stream.model:
            if publisher.connection is not None:
                raise PayloadError("other_model", f"{topic.pod}: it already publishes another model")
            # Another model under the same name is another engine.
            self._forget(stream.holder)
            self._open(stream, now_s)
        return self.publishers[stream.holder]

    def _admit(self, stream: PodStream, now_s: float) -> bool:
        if now_s < self._full_until_s:
            return False
        undeclared = [each for each in self.publishers.values() if each.name not in self._declared]
        if len(undeclared) >= self._config.undeclared_pods:
            lost_before_s = now_s - self._config.undeclared_forget_s
            gone = [each for each in undeclared if not each.connected and each.lost_s <= lost_before_s]
            if not gone:
                self._full_until_s = now_s + _FULL_S
                return False
            self._forget(gone[0].name)
        self._open(stream, now_s)
        return True

    def _open(self, stream: PodStream, now_s: float) -> None:
        self._ingest.opened(stream)
        publisher = BoundStream(stream, self._subscriber)
        publisher.lost_s = now_s
        publisher.report()
        self.publishers[stream.holder] = publisher

    def _forget(self, holder: str) -> None:
        self.publishers.pop(holder).close()
        self._subscriber.end_relay(holder)
        self._ingest.closed(holder)
