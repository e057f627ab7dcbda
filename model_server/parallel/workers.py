"""The processes of the ranks above 0, seen from rank 0: starts them, talks to them, notices when one is lost.

In: orders. Out: the same order at every rank, and their answers, or a WorkerError. Each process has a
connection of its own: when rank 0 closes it, or ends in whatever way, the process ends too.
"""

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from model_server.errors import WorkerError
from model_server.parallel.messages import Answer, Order, Start, encode, read_answer

_WORKER = "model_server.parallel.worker"
_STOP_S = 10.0
_NOTICE_S = 5.0


class Workers:
    """Processes with ranks 1, 2 and so on.

    Args:
        count: How many.
        on_loss: Called on a thread of their own once, if one ends though nobody closed it.

    Raises:
        WorkerError: They cannot be started.
    """

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
        self._watchers = [
            threading.Thread(target=self._watch, args=(rank, process), name=f"rank {rank}", daemon=True)
            for rank, process in enumerate(self._processes, 1)
        ]
        for watcher in self._watchers:
            watcher.start()

    def start(self, orders: Sequence[Start]) -> None:
        """Give each its first message.

        Raises:
            WorkerError: One of them is lost.
        """
        for connection, order in zip(self._connections, orders, strict=True):
            self._send(connection, encode(order))

    def tell(self, method: str, args: Sequence[Any], *, is_answered: bool = False) -> None:
        """Give all the same order; it is carried out after those before it.

        Raises:
            WorkerError: One of them is lost.
        """
        if not self._connections:
            return
        data = encode(Order(method, args, is_answered))
        with self._sending:
            for connection in self._connections:
                self._send(connection, data)

    def confirm(self) -> list[Any]:
        """Wait for the answers to what was told last; returns what came of it.

        Raises:
            ModelServerError: The first failure, as this process's own.
        """
        return [answer.read(rank) for rank, answer in enumerate(self._answers(), 1)]

    def ask(self, method: str, args: Sequence[Any], own: Callable[[], Any]) -> list[Any]:
        """Give all an order, do this rank's part of it meanwhile, and wait for the answers.

        Args:
            method: Of `ModelRunner`.
            args: Its arguments.
            own: This rank's part.

        Returns:
            What came of it, by rank.

        Raises:
            WorkerError: One of them is lost.
            ModelServerError: The first failure elsewhere, as this process's own.
            Exception: Whatever `own` raises, once the others have answered.
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
        """Raise WorkerError if one of them is lost."""
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
