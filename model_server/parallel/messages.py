"""What rank 0 and the other ranks say to each other: msgpack over a connection that only they have.

In: steps, block moves and orders. Out: bytes, and back. Numbers that come by the thousand travel as arrays.
"""

from array import array
from collections.abc import Mapping, Sequence

import msgspec

from model_server.attention import Span
from model_server.config import EngineConfig
from model_server.errors import AdapterError, ConfigError, ModelError, ModelServerError
from model_server.lora import LoraAdapter
from model_server.shapes import Division
from model_server.step import Step

_Numbers = bytes  # of an array("i")


class Start(msgspec.Struct, frozen=True, tag=True):
    """Load the model; answered.

    Attributes:
        config: The engine's settings.
        division: Which rank the receiver is.
        log_level: What to log from, as `logging` numbers it.
    """

    config: EngineConfig
    division: Division
    log_level: int


class Join(msgspec.Struct, frozen=True, tag=True):
    """Connect to the other ranks by this file; answered."""

    rendezvous: str


class Run(msgspec.Struct, frozen=True, tag=True):
    """Compute a step.

    Attributes:
        token_ids: As `Step.token_ids`.
        rows: As `Step.rows`.
        spans: Of each its start, its length and its block tables.
        lora_ids: Per span, 0 for none; empty if there are none at all.
        dropped: Adapters that no request has any more.
    """

    token_ids: _Numbers
    rows: _Numbers
    spans: list[tuple[int, int, list[_Numbers]]]
    lora_ids: list[int]
    dropped: list[int]

    @classmethod
    def of(cls, step: Step, dropped: list[int]) -> "Run":
        """Describe a step."""
        spans = [
            (span.start, span.length, [pack(table) for table in span.block_tables]) for span in step.spans
        ]
        lora_ids = [0 if adapter is None else adapter.lora_id for adapter in step.adapters]
        return cls(pack(step.token_ids), pack(step.rows), spans, lora_ids if any(lora_ids) else [], dropped)

    def step(self, adapters: Mapping[int, LoraAdapter]) -> Step:
        """Return the step."""
        spans = [
            Span(start, length, [unpack(table) for table in tables]) for start, length, tables in self.spans
        ]
        lora_ids = self.lora_ids or [0] * len(spans)
        own = [adapters[lora_id] if lora_id else None for lora_id in lora_ids]
        return Step(unpack(self.token_ids), unpack(self.rows), spans, own)


class NewCopies(msgspec.Struct, frozen=True, tag=True):
    """Take memory for this many blocks of the host tier; answered."""

    host_blocks: int


class Store(msgspec.Struct, frozen=True, tag=True):
    """Copy blocks to the host tier; `number` names the transfer."""

    number: int
    blocks: _Numbers
    slots: _Numbers


class Restore(msgspec.Struct, frozen=True, tag=True):
    """Copy blocks back from the host tier; `number` names the transfer."""

    number: int
    slots: _Numbers
    blocks: _Numbers


class Settle(msgspec.Struct, frozen=True, tag=True):
    """Do nothing more before this transfer is done: rank 0 takes it as done."""

    number: int


class Fence(msgspec.Struct, frozen=True, tag=True):
    """Let nothing computed next overtake a restore."""


class FreeKv(msgspec.Struct, frozen=True, tag=True):
    """Give the memory of both tiers back."""


class AllocateKv(msgspec.Struct, frozen=True, tag=True):
    """Take the pool's memory again; answered."""


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Load a LoRA adapter; answered, with the hash of its content."""

    directory: str
    name: str
    lora_id: int


class Done(msgspec.Struct, frozen=True, tag=True):
    """The answer when all went well."""

    text: str = ""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The answer when it did not.

    Attributes:
        kind: Name of the error's class.
        message: What it says.
    """

    kind: str
    message: str

    @classmethod
    def of(cls, error: Exception) -> "Failed":
        """Describe an error."""
        return cls(type(error).__name__, str(error) or type(error).__name__)

    def error(self, rank: int) -> ModelServerError:
        """Return it as this process's own."""
        known = _ERRORS.get(self.kind)
        return ModelServerError(f"rank {rank}: {self.message}") if known is None else known(self.message)


Order = (
    Start
    | Join
    | Run
    | NewCopies
    | Store
    | Restore
    | Settle
    | Fence
    | FreeKv
    | AllocateKv
    | LoadAdapter
)
Answer = Done | Failed

_ERRORS = {error.__name__: error for error in (ConfigError, ModelError, AdapterError)}
_encoder = msgspec.msgpack.Encoder()
_orders = msgspec.msgpack.Decoder(Order)
_answers = msgspec.msgpack.Decoder(Answer)


def encode(message: Order | Answer) -> bytes:
    """Return a message as bytes."""
    return _encoder.encode(message)


def read_order(data: bytes) -> Order:
    """Return what rank 0 wants."""
    order: Order = _orders.decode(data)
    return order


def read_answer(data: bytes) -> Answer:
    """Return what another rank answers."""
    answer: Answer = _answers.decode(data)
    return answer


def pack(numbers: Sequence[int]) -> bytes:
    """Return numbers below 2^31 as bytes."""
    return array("i", numbers).tobytes()


def unpack(data: bytes) -> "array[int]":
    """Return what was packed."""
    numbers = array("i")
    numbers.frombytes(data)
    return numbers
