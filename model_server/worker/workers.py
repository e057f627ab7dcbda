"""The processes of the ranks above 0: rank 0 starts them, talks to them, and notices when one is lost.

Messages are msgpack; arrays of numbers travel as such, for they come by the thousand. Each process is
`python -m model_server.worker.workers FILE_DESCRIPTOR`: it takes orders over the connection with this
descriptor. When rank 0 closes that, or ends in whatever way, the process ends too.
"""

import logging
import os
import select
import signal
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from model_server.config import EngineConfig
from model_server.errors import AdapterError, ConfigError, ModelError, ModelServerError, WorkerError
from model_server.model.ranks import Ranks
from model_server.shapes import Division
from model_server.worker.model_runner import ModelRunner, load_runner

_ARRAY = 1  # msgpack extension: 32-bit integers in the byte order of the machine, which all ranks are on
_ERRORS = {error.__name__: error for error in (ConfigError, ModelError, AdapterError)}
_WORKER = "model_server.worker.workers"
_STOP_S = 10.0
_NOTICE_S = 5.0


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
        kind = type(error).__name__
        return cls(None, kind, str(error) or kind)

    def read(self, rank: int) -> Any:
        """Return the result, or raise the failure as this process's own."""
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


class Workers:
    """Processes with ranks 1, 2 and so on; `on_loss` is called once, on a thread, if one ends unasked."""

    def __init__(self, count: int, on_loss: Callable[[], None]) -> None:
        self._on_loss = on_loss
        self._sending = threading.Lock()
        self._asking = threading.Lock()
        self._closing = False
        self._lost: str | None = None
        self._noticed = threading.Event()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        with ExitStack() as undo:
            undo.callback(self.close)
            for _ in range(count):
                self._spawn()
            undo.pop_all()
        for rank, process in enumerate(self._processes, 1):
            threading.Thread(
                target=self._watch, args=(rank, process), name=f"rank {rank}", daemon=True
            ).start()

    def start(self, orders: Sequence[Start]) -> None:
        """Give each its first message."""
        for connection, order in zip(self._connections, orders, strict=True):
            self._send(connection, encode(order))

    def tell(self, method: str, args: Sequence[Any], *, is_answered: bool = False) -> None:
        """Give all the same order; it is carried out after those before it."""
        if not self._connections:
            return
        data = encode(Order(method, args, is_answered))
        with self._sending:
            for connection in self._connections:
                self._send(connection, data)

    def confirm(self) -> list[Any]:
        """Wait for the answers to what was told last; raises the first failure as this process's own."""
        return [answer.read(rank) for rank, answer in enumerate(self._answers(), 1)]

    def ask(self, method: str, args: Sequence[Any], own: Callable[[], Any]) -> list[Any]:
        """Give all an order, do this rank's part of it meanwhile, and return what came of it, by rank.

        The first failure elsewhere is raised as this process's own; what `own` raises, once others answered.
        """
        with self._asking:
            self.tell(method, args, is_answered=True)
            try:
                result = own()
            except BaseException:
                self._answers()
                raise
            return [result, *self.confirm()]

    def check(self) -> None:
        if self._lost is not None:
            raise WorkerError(self._lost)

    def loss(self, otherwise: str) -> WorkerError:
        """Return the error for what went wrong: a lost process, or if there is none, what is given."""
        # What breaks first is a connection; how the process ended is known a moment later.
        self._noticed.wait(_NOTICE_S)
        return WorkerError(self._lost or f"a process of the model {otherwise}")

    def close(self) -> None:
        """End the processes and wait for them; may be called twice."""
        self._closing = True
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _spawn(self) -> None:
        own, other = Pipe()
        self._connections.append(own)
        try:
            with other:
                command = [sys.executable, "-m", _WORKER, str(other.fileno())]
                # A session of its own: Ctrl-C in a terminal is for rank 0, which then ends the others.
                self._processes.append(
                    subprocess.Popen(command, pass_fds=[other.fileno()], start_new_session=True)
                )
        except OSError as error:
            raise WorkerError(f"cannot start another process for the model: {error}") from error

    def _send(self, connection: Connection, data: bytes) -> None:
        try:
            connection.send_bytes(data)
        except OSError as error:
            raise self.loss("cannot be reached") from error

    def _answers(self) -> list[Answer]:
        try:
            return [read_answer(connection.recv_bytes()) for connection in self._connections]
        except (OSError, EOFError) as error:
            raise self.loss("does not answer") from error

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if self._closing or self._lost is not None:
            return
        how = f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
        self._lost = f"rank {rank} of the model (process {process.pid}) ended {how}"
        self._noticed.set()
        self._on_loss()


logger = logging.getLogger(__name__)

_EXIT_FAILED = 1
_NOTICE_MS = 1000
_METHODS = frozenset(("join", "execute", "store", "restore", "settle", "fence", "allocate", "free"))
# Beside the steps, which others' requests wait for.
_METHODS_BESIDE = frozenset(("load_adapter",))


def carry_out(order: Order, runner: ModelRunner, connection: Connection) -> None:
    """Do what rank 0 wants, and answer if it waits for that."""
    assert order.method in _METHODS | _METHODS_BESIDE, f"{order.method} is no order"
    if order.method in _METHODS_BESIDE:
        threading.Thread(target=_answer, args=(order, runner, connection), daemon=True).start()
    elif order.is_answered:
        _answer(order, runner, connection)
    else:
        getattr(runner, order.method)(*order.args)


def _answer(order: Order, runner: ModelRunner, connection: Connection) -> None:
    try:
        answer = Answer(getattr(runner, order.method)(*order.args))
    except Exception as error:
        answer = Answer.of(error)
    connection.send_bytes(encode(answer))


def main(arguments: Sequence[str]) -> int:
    """Take orders from the connection with this file descriptor until it closes; returns 1 on failure."""
    # Whoever stops all processes at once still wants rank 0 to finish its requests.
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, signal.SIG_IGN)
    connection = Connection(int(arguments[0]))
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    try:
        start = read_start(connection.recv_bytes())
        logging.basicConfig(
            level=start.log_level,
            format=f"%(asctime)s %(levelname)s rank {start.division.rank}: %(name)s: %(message)s",
        )
        try:
            runner = load_runner(start.config, Ranks(start.division))
        except ModelServerError as error:
            connection.send_bytes(encode(Answer.of(error)))
            return _EXIT_FAILED
        connection.send_bytes(encode(Answer()))
        while True:
            carry_out(read_order(connection.recv_bytes()), runner, connection)
    except (EOFError, ConnectionError):
        return 0
    except Exception:
        # An error that others cause by ending is no fault of this rank's.
        if not _closes(connection, _NOTICE_MS):
            logger.critical("this rank cannot go on", exc_info=True)
        return _EXIT_FAILED


def _end_with(connection: Connection) -> None:
    """End this process when the connection closes, also in the middle of a step that can never end."""
    _closes(connection, None)
    os._exit(0)


def _closes(connection: Connection, within_ms: int | None) -> bool:
    closing = select.poll()
    closing.register(connection.fileno(), 0)  # hang-ups are always told
    return bool(closing.poll(within_ms))


if __name__ == "__main__":
    code = main(sys.argv[1:])
    logging.shutdown()
    # Without taking things down one by one: a group whose other ranks are gone may wait for them.
    os._exit(code)
