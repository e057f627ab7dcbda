"""Worker processes of the ranks above 0, and their messages: rank 0 starts, calls and watches them.

Messages are msgpack; integer arrays are encoded as raw bytes, because a step has thousands of numbers. Each
process is `python -m model_server.worker.workers FILE_DESCRIPTOR` and executes the calls that it receives
over the connection with this descriptor. It ends when rank 0 closes the connection or dies.
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
from model_server.shapes.shape import ModelRank
from model_server.worker.model_runner import ModelRunner, load_runner

_ARRAY = 1  # msgpack extension: 32-bit integers in native byte order; all ranks are on one machine
_ERRORS = {error.__name__: error for error in (ConfigError, ModelError, AdapterError)}
_WORKER = "model_server.worker.workers"
_STOP_S = 10.0
_NOTICE_S = 5.0


class Start(msgspec.Struct, frozen=True):
    """First message to a worker: load the model. Answered by a `MethodResult`."""

    config: EngineConfig  # the engine's settings
    model_rank: ModelRank  # the receiver's rank
    log_level: int  # lowest level to log, a constant of `logging`


class MethodCall(msgspec.Struct, frozen=True, array_like=True):
    """Call of a `ModelRunner` method."""

    method: str
    args: Sequence[Any]  # numbers, strings, and lists of them
    wants_result: bool  # whether rank 0 waits for a `MethodResult`


class MethodResult(msgspec.Struct, frozen=True):
    """Result or failure of a `MethodCall`."""

    result: Any = None  # return value
    failure: str | None = None  # class name of the error; None on success
    message: str = ""  # text of the error

    @classmethod
    def from_error(cls, error: Exception) -> "MethodResult":
        kind = type(error).__name__
        return cls(None, kind, str(error) or kind)

    def unwrap(self, rank: int) -> Any:
        """Return the result, or raise the failure of `rank` in this process."""
        if self.failure is None:
            return self.result
        known = _ERRORS.get(self.failure)
        raise ModelServerError(f"rank {rank}: {self.message}") if known is None else known(self.message)


def _encode_array(value: object) -> msgspec.msgpack.Ext:
    if isinstance(value, array) and value.typecode == "i":
        return msgspec.msgpack.Ext(_ARRAY, value.tobytes())
    raise NotImplementedError(f"{type(value).__name__} cannot be sent to other ranks")


def _decode_array(code: int, data: memoryview) -> "array[int]":
    assert code == _ARRAY, f"unknown extension {code}"
    numbers = array("i")
    numbers.frombytes(data)
    return numbers


encode = msgspec.msgpack.Encoder(enc_hook=_encode_array).encode
decode_start = msgspec.msgpack.Decoder(Start).decode
decode_call = msgspec.msgpack.Decoder(MethodCall, ext_hook=_decode_array).decode
decode_result = msgspec.msgpack.Decoder(MethodResult).decode


class WorkerProcesses:
    """Worker processes of ranks 1 and up, which load their models; see `read_results`.

    A thread calls `on_loss` once if one ends unexpectedly.
    """

    def __init__(self, starts: Sequence[Start], on_loss: Callable[[], None]) -> None:
        self._on_loss = on_loss
        self._send_lock = threading.Lock()
        self._rpc_lock = threading.Lock()
        self._closing = False
        self._lost: str | None = None
        self._loss_noticed = threading.Event()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        with ExitStack() as undo:
            undo.callback(self.close)
            for _ in starts:
                self._spawn()
            for rank, process in enumerate(self._processes, 1):
                watch, name = (rank, process), f"rank {rank}"
                threading.Thread(target=self._watch, args=watch, name=name, daemon=True).start()
            for connection, start in zip(self._connections, starts, strict=True):
                self._send(connection, encode(start))
            undo.pop_all()

    def send_call(self, method: str, args: Sequence[Any], *, wants_result: bool = False) -> None:
        """Send all workers a call; each worker runs calls in the order sent."""
        if not self._connections:
            return
        data = encode(MethodCall(method, args, wants_result))
        with self._send_lock:
            for connection in self._connections:
                self._send(connection, data)

    def read_results(self) -> list[Any]:
        """Wait for the results of the start or of the last call, by rank; raise the first failure."""
        return [result.unwrap(rank) for rank, result in enumerate(self._results(), 1)]

    def collective_rpc(self, method: str, args: Sequence[Any], own: Callable[[], Any]) -> list[Any]:
        """Call a method on all workers and `own` on rank 0; return the results by rank.

        A worker's first failure is raised here; an error of `own` is raised once all workers have replied.
        """
        with self._rpc_lock:
            self.send_call(method, args, wants_result=True)
            try:
                result = own()
            except BaseException:
                self._results()
                raise
            return [result, *self.read_results()]

    def check_health(self) -> None:
        if self._lost is not None:
            raise WorkerError(self._lost)

    def lost_error(self, otherwise: str) -> WorkerError:
        """Return the error to raise: the lost process if one is known, else `otherwise`."""
        # The connection breaks first; the exit status of the process is known a moment later.
        self._loss_noticed.wait(_NOTICE_S)
        return WorkerError(self._lost or f"a process of the model {otherwise}")

    def close(self) -> None:
        """Stop the processes and wait for them. Idempotent."""
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
                # A session of its own: Ctrl-C in a terminal reaches only rank 0, which stops the others.
                process = subprocess.Popen(command, pass_fds=[other.fileno()], start_new_session=True)
                self._processes.append(process)
        except OSError as error:
            raise WorkerError(f"cannot start a worker process of the model: {error}") from error

    def _send(self, connection: Connection, data: bytes) -> None:
        try:
            connection.send_bytes(data)
        except OSError as error:
            raise self.lost_error("cannot be reached") from error

    def _results(self) -> list[MethodResult]:
        try:
            return [decode_result(connection.recv_bytes()) for connection in self._connections]
        except (OSError, EOFError) as error:
            raise self.lost_error("does not answer") from error

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if self._closing or self._lost is not None:
            return
        how = f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
        self._lost = f"rank {rank} of the model (process {process.pid}) ended {how}"
        self._loss_noticed.set()
        self._on_loss()


logger = logging.getLogger(__name__)

_EXIT_FAILED = 1
_NOTICE_MS = 1000
_CALLS = "join", "execute_model", "store", "restore", "wait_transfer", "fence", "profile", "allocate", "free"
# Run on a thread of their own, so that other requests' steps do not wait.
_BACKGROUND_METHODS = {"load_adapter"}


def execute_call(call: MethodCall, runner: ModelRunner, connection: Connection) -> None:
    """Execute a call of rank 0 and send the result if rank 0 waits for it."""
    assert call.method in (*_CALLS, *_BACKGROUND_METHODS), f"unknown method: {call.method}"
    if call.method in _BACKGROUND_METHODS:
        threading.Thread(target=_send_result, args=(call, runner, connection), daemon=True).start()
    elif call.wants_result:
        _send_result(call, runner, connection)
    else:
        getattr(runner, call.method)(*call.args)


def _send_result(call: MethodCall, runner: ModelRunner, connection: Connection) -> None:
    try:
        result = MethodResult(getattr(runner, call.method)(*call.args))
    except Exception as error:
        result = MethodResult.from_error(error)
    connection.send_bytes(encode(result))


def main(arguments: Sequence[str]) -> int:
    """Execute calls received over the connection with the given file descriptor; return the exit status."""
    # A signal to the whole process group must not stop this rank before rank 0 has finished its requests.
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, signal.SIG_IGN)
    connection = Connection(int(arguments[0]))
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    try:
        start = decode_start(connection.recv_bytes())
        logging.basicConfig(
            level=start.log_level,
            format=f"%(asctime)s %(levelname)s rank {start.model_rank.rank}: %(name)s: %(message)s",
        )
        try:
            runner = load_runner(start.config, Ranks(start.model_rank))
        except ModelServerError as error:
            connection.send_bytes(encode(MethodResult.from_error(error)))
            return _EXIT_FAILED
        connection.send_bytes(encode(MethodResult()))
        while True:
            execute_call(decode_call(connection.recv_bytes()), runner, connection)
    except (EOFError, ConnectionError):
        return 0
    except Exception:
        # Log only if the connection stays open: the end of another rank causes errors here, too.
        if not _closes(connection, _NOTICE_MS):
            logger.critical("worker failed", exc_info=True)
        return _EXIT_FAILED


def _end_with(connection: Connection) -> None:
    """Exit this process when the connection closes, even during a step that cannot complete."""
    _closes(connection, None)
    os._exit(0)


def _closes(connection: Connection, within_ms: int | None) -> bool:
    closing = select.poll()
    closing.register(connection.fileno(), 0)  # POLLHUP is always reported
    return bool(closing.poll(within_ms))


if __name__ == "__main__":
    code = main(sys.argv[1:])
    logging.shutdown()
    # Skip the interpreter's cleanup: a process group may block on ranks that are gone.
    os._exit(code)
