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
    """The first message: load the model; answered.

    Attributes:
        config: The engine's settings.
        division: Which rank the receiver is.
        log_level: What to log from, as `logging` numbers it.
    """

    config: EngineConfig
    division: Division
    log_level: int


class Order(msgspec.Struct, frozen=True, array_like=True):
    """Call a method of `ModelRunner`.

    Attributes:
        method: Its name.
        args: Numbers, texts and lists of such.
        is_answered: Whether rank 0 waits for what comes of it.
    """

    method: str
    args: Sequence[Any]
    is_answered: bool


class Answer(msgspec.Struct, frozen=True):
    """What came of an order.

    Attributes:
        result: What it returned.
        failure: Name of the error's class, if it failed.
        message: What the error says.
    """

    result: Any = None
    failure: str | None = None
    message: str = ""

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
