"""Fake of a device's streams and events that finds races, on CPU tensors.

Operations run at once, but each is ordered only as on a device: behind the operations of its stream, behind
events and streams that its stream waits for, and behind what the host had waited for when it launched them.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Clock = dict[str, int]  # per stream, how many of its operations are known to have ended


class Operation(NamedTuple):
    """A copy, gather or scatter with the addresses of the bytes that it touches."""

    stream: str
    index: int
    name: str
    reads: frozenset[int]
    writes: frozenset[int]


class FakeStream:
    """Stream that orders its operations by a vector clock."""

    def __init__(self, device: torch.device | None = None, *, owner: "FakeStreams", name: str) -> None:
        self.name = name
        self.clock: Clock = defaultdict(int)
        self._owner = owner

    def wait_stream(self, other: "FakeStream") -> None:
        """Order later operations behind those of another stream."""
        _merge(self.clock, other.clock)

    def wait_event(self, event: "FakeEvent") -> None:
        """Order later operations behind an event."""
        _merge(self.clock, event.clock)


class FakeEvent:
    """Event that completes when the host waits for it, or while the device is idle."""

    def __init__(self, owner: "FakeStreams") -> None:
        self.clock: Clock = {}
        self._owner = owner

    def record(self, stream: FakeStream | None = None) -> None:
        """Record the end of a stream's operations so far."""
        self.clock = dict((stream or self._owner.current).clock)

    def query(self) -> bool:
        """Return whether the host knows that the event has happened."""
        if self._owner.idle:
            self.synchronize()
        return all(self._owner.host.clock[name] >= index for name, index in self.clock.items())

    def synchronize(self) -> None:
        """Make the host wait."""
        self._owner.host.wait_event(self)


class FakeStreams(TorchFunctionMode):
    """Module of streams and events. As a context, it records operations and raises on a race."""

    def __init__(self) -> None:
        super().__init__()
        self.host = FakeStream(owner=self, name="host")
        self.model = FakeStream(owner=self, name="model")
        self.sides: list[FakeStream] = []
        self.current = self.model
        self.operations: list[Operation] = []
        self.allocations: list[tuple[int, ...]] = []  # shapes
        self.idle = False
        self.before: Callable[[str], None] = lambda name: None  # called with each operation's name; may raise

    def Stream(self, device: torch.device) -> FakeStream:  # noqa: N802 -- the name in torch
        """Return a new stream."""
        self.sides.append(FakeStream(owner=self, name=f"side {len(self.sides)}"))
        return self.sides[-1]

    def Event(self) -> FakeEvent:  # noqa: N802 -- the name in torch
        """Return a new event that counts as happened."""
        return FakeEvent(self)

    def current_stream(self, device: torch.device) -> FakeStream:
        """Return the stream of the innermost context."""
        return self.current

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        """Launch operations on a stream."""
        outer, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = outer

    def synchronize(self, device: torch.device) -> None:
        """Make the host wait for all streams."""
        for stream in (self.model, *self.sides):
            self.host.wait_stream(stream)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        if name == "empty":
            self.allocations.append(tuple(torch.Size(args[0] if isinstance(args[0], tuple) else args)))
        elif name == "copy_":
            stream = self.current if kwargs.get("non_blocking") else self.host
            self._record(name, stream, [_addresses(args[1])], _addresses(args[0]))
        elif name == "__setitem__":
            self._record(name, self.host, [_addresses(args[2])], _addresses(args[0][args[1]]))
        elif name == "index_select":
            pool, _, rows = args
            self._record(
                name, self.current, [_addresses(rows), _addresses(pool)[rows]], _addresses(kwargs["out"])
            )
        elif name == "index_copy_":
            pool, _, rows, source = args
            self._record(name, self.current, [_addresses(rows), _addresses(source)], _addresses(pool)[rows])
        return func(*args, **kwargs)

    def _record(self, name: str, stream: FakeStream, reads: Sequence[Tensor], writes: Tensor) -> None:
        self.before(name)
        _merge(stream.clock, self.host.clock)
        stream.clock[stream.name] += 1
        index = stream.clock[stream.name]
        read, written = frozenset(torch.cat([each.flatten() for each in reads]).tolist()), writes.flatten()
        new = Operation(stream.name, index, name, read, frozenset(written.tolist()))
        for old in self.operations:
            if old.writes & (new.reads | new.writes) or old.reads & new.writes:
                assert stream.clock[old.stream] >= old.index, f"{name} on {stream.name} races with {old[:3]}"
        self.operations.append(new)


def _addresses(tensor: Tensor) -> Tensor:
    """Return the address of each element, of the tensor's shape."""
    addresses = torch.tensor(tensor.data_ptr())
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        steps = torch.arange(size) * stride * tensor.element_size()
        addresses = addresses + steps.view(-1, *[1] * (tensor.dim() - 1 - axis))
    return addresses


def _merge(into: Clock, other: Clock) -> None:
    for name, index in other.items():
        into[name] = max(into.get(name, 0), index)
