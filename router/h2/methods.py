"""The methods of a server: servicers' handlers in, for a call's path what serves it out.

Takes handlers in the forms that grpcio's generated code registers. Beside them there are exchanges, which
take a stream's messages one by one and so need no thread of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from router.h2.exchange_call import ExchangeCall


class Exchange(Protocol):
    """One stream, served message by message.

    Attributes:
        finished: Whether the stream is to be closed from our side.
        is_routed: Whether what follows can be answered without waiting for anything.
    """

    finished: bool
    is_routed: bool

    def answers(self, message: Any) -> Iterable[Any]:
        """The answers to one message."""

    def close(self) -> None:
        """The stream has ended, however it did."""


@dataclass(frozen=True, slots=True)
class ExchangeMethod:
    """A method whose streams are exchanges.

    Attributes:
        open: Makes one for each stream.
        cut: Told of each stream that is cut off because its request comes too slowly.
        opened: Told of each stream; what it returns is called with the code that the stream ends with.
    """

    open: Callable[[ExchangeCall], Exchange]
    read: Callable[[bytes], Any]
    written: Callable[[Any], bytes]
    cut: Callable[[], object] = bool
    opened: Callable[[], Callable[[str], object]] | None = None


class CallDetails(NamedTuple):
    """What generic handlers are asked with (grpc.HandlerCallDetails)."""

    method: str
    invocation_metadata: Any = ()


class Methods:
    """All methods of one server; servicers add theirs as to a grpc.Server."""

    def __init__(self) -> None:
        self._generic: list[Any] = []
        self._found: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        self._generic += handlers

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        for name, handler in handlers.items():
            self._found[f"/{service}/{name}"] = handler

    def add_exchange(self, path: str, method: ExchangeMethod) -> None:
        self._found[path] = method

    def find(self, path: str) -> ExchangeMethod | Any | None:
        """The method, or grpcio's handler, for a path; None: there is none."""
        found = self._found.get(path)
        if found is not None:
            return found
        details: Any = CallDetails(path)
        for handler in self._generic:
            if (found := handler.service(details)) is not None:
                # Bounded: only paths that exist are kept.
                self._found[path] = found
                return found
        return None
