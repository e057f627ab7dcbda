"""What the streams share on the subscriber's thread, and what that thread asks of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import zmq

from indexer.config import PodStream
from indexer.snapshot import Fetched


class Owner(Protocol):
    """Who has sockets watched and things to do at times; whoever fails is reset."""

    @property
    def name(self) -> str:
        """Who it is, for the log."""
        ...

    @property
    def due_s(self) -> float:
        """When `tick` must be called next."""
        ...

    def tick(self, now_s: float) -> None:
        """Does what is due."""
        ...

    def reset(self, now_s: float) -> None:
        """Begins anew after an error of our own."""
        ...

    def close(self) -> None:
        """Ends it."""
        ...


class Sockets(Protocol):
    """What all streams share: the context, the poller's list, the right to replay, the snapshots' workers.

    Attributes:
        context: Where sockets are made.
        free_replays: How many more replays may run at once.
        has_peers: Whether others can be asked for snapshots of any engine.
    """

    context: zmq.Context[zmq.Socket[bytes]]
    free_replays: int
    has_peers: bool

    def watch(self, owner: Owner, watched: zmq.Socket[bytes], on_readable: Callable[[float], None]) -> None:
        """Calls back with the time whenever the socket can be read."""
        ...

    def unwatch(self, watched: zmq.Socket[bytes]) -> None:
        """Ends that."""
        ...

    def fetch(
        self, owner: Owner, stream: PodStream, deliver: Callable[[Fetched, float], None], *, peers: bool
    ) -> None:
        """Gets a snapshot, of peers too or not, without waiting for it, and delivers it on this thread."""
        ...
