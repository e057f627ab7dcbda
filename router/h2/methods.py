"""The methods of a server: servicers' handlers in, for a call's path what serves it out.

Takes handlers in the forms that grpcio's generated code registers. Beside them there are exchanges, which
take a stream's messages one by one and so need no thread of their own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import grpc

from router.h2.messages import MessageError

_log = logging.getLogger(__name__)


class ExchangeStream(Protocol):
    """What an exchange knows of its stream."""

    def is_active(self) -> bool:
        """Whether the client still waits."""

    def interrupt(self, answers: Callable[[], Iterable[Any]]) -> None:
        """Ends the stream from outside, with these answers, behind what is being answered; does not block."""


class Exchange(Protocol):
    """One stream, served message by message.

    Attributes:
        finished: Whether the stream is to be closed from our side.
        is_routed: Whether what follows can be answered without waiting for anything.
    """

    finished: bool

    @property
    def is_routed(self) -> bool:
        """See above."""

    def answers(self, message: Any) -> Iterable[Any]:
        """The answers to one message."""

    def close(self) -> None:
        """The stream has ended, however it did."""


@dataclass(frozen=True, slots=True)
class ExchangeMethod:
    """A method whose streams are exchanges.

    Attributes:
        open: Makes one for each stream.
        read: A message's bytes in, the message out.
        written: An answer in, its bytes out.
        cut: Told of each stream that is cut off because its request comes too slowly.
        opened: Told of each stream; what it returns is called with the code that the stream ends with.
    """

    open: Callable[[ExchangeStream], Exchange]
    read: Callable[[bytes], Any]
    written: Callable[[Any], bytes]
    cut: Callable[[], object] = bool
    opened: Callable[[], Callable[[str], object]] | None = None


class CallDetails(NamedTuple):
    """What generic handlers are asked with (grpc.HandlerCallDetails)."""

    method: str
    invocation_metadata: Any = ()


class Methods:
    """All methods of one server."""

    def __init__(self) -> None:
        self._generic: list[Any] = []
        self._found: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """As grpc.Server's."""
        self._generic += handlers

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        """As grpc.Server's."""
        for name, handler in handlers.items():
            self._found[f"/{service}/{name}"] = handler

    def add_exchange(self, path: str, method: ExchangeMethod) -> None:
        """Serves a method's streams by exchanges."""
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


def not_one_message(path: str) -> MessageError:
    """What ends a call that must have one message, and has not (gRPC's statuscodes.md)."""
    return MessageError(grpc.StatusCode.UNIMPLEMENTED, f'"{path}" requires exactly one request message.')


def serialized(message: Any, serializer: Callable[[Any], bytes] | None) -> bytes:
    """A message's bytes; without a serializer it is bytes already.

    Raises:
        MessageError: It cannot be written.
    """
    try:
        return message if serializer is None else serializer(message)
    except Exception as error:
        _log.exception("an answer cannot be serialized")
        raise MessageError(grpc.StatusCode.INTERNAL, "Failed to serialize response!") from error


def deserialized(data: bytes, deserializer: Callable[[bytes], Any] | None) -> Any:
    """A message of its bytes; without a deserializer it stays bytes.

    Raises:
        MessageError: It is none.
    """
    try:
        return data if deserializer is None else deserializer(data)
    except Exception as error:
        raise MessageError(grpc.StatusCode.INTERNAL, "Exception deserializing request!") from error
