"""What rank 0 and the other ranks say to each other: msgpack over a connection that only they have.

In: methods of `ModelRunner` with plain arguments, and what came of them. Out: bytes, and back. Arrays of
numbers travel as such, for they come by the thousand.
"""

from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from model_server.config import EngineConfig
from model_server.errors import AdapterError, ConfigError, ModelError, ModelServerError
from model_server.shapes import Division

_ARRAY = 1  # msgpack extension: 32-bit integers in the byte order of the machine, which all ranks are on
_ERRORS = {error.__name__: error for error in (ConfigError, ModelError, AdapterError)}


class Start(msgspec.Struct, frozen=True):
    """The first message: load the model; answered."""

    config: EngineConfig  # the engine's settings
    division: Division  # which rank the receiver is
    log_level: int  # what to log from, as `logging` numbers it


class Order(msgspec.Struct, frozen=True, array_like=True):
    """Call a method of `ModelRunner`."""

    method: str  # its name
    args: Sequence[Any]  # numbers, texts and lists of such
    is_answered: bool  # whether rank 0 waits for what comes of it


class Answer(msgspec.Struct, frozen=True):
    """What came of an order."""

    result: Any = None  # what it returned
    failure: str | None = None  # name of the error's class, if it failed
    message: str = ""  # what the error says

    @classmethod
    def of(cls, error: Exception) -> "Answer":
        """Describe an error."""
        kind = type(error).__name__
        return cls(None, kind, str(error) or kind)

    def read(self, rank: int) -> Any:
        """Return the result.

        Raises:
            ModelServerError: The failure, as this process's own.
        """
        if self.failure is None:
            return self.result
        known = _ERRORS.get(self.failure)
        raise ModelServerError(f"rank {rank}: {self.message}") if known is None else known(self.message)


def encode(message: Start | Order | Answer) -> bytes:
    """Return a message as bytes."""
    return _encoder.encode(message)


def _as_extension(value: object) -> msgspec.msgpack.Ext:
    if isinstance(value, array) and value.typecode == "i":
        return msgspec.msgpack.Ext(_ARRAY, value.tobytes())
    raise NotImplementedError(f"{type(value).__name__} cannot be sent to other ranks")


def _from_extension(code: int, data: memoryview) -> "array[int]":
    assert code == _ARRAY, f"unknown extension {code}"
    numbers = array("i")
    numbers.frombytes(data)
    return numbers


_encoder = msgspec.msgpack.Encoder(enc_hook=_as_extension)
read_start = msgspec.msgpack.Decoder(Start).decode
read_order = msgspec.msgpack.Decoder(Order, ext_hook=_from_extension).decode
read_answer = msgspec.msgpack.Decoder(Answer).decode
