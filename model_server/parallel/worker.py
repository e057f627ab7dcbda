"""One rank above 0 as a process: `python -m model_server.parallel.worker FILE_DESCRIPTOR`.

It takes orders over the connection with this descriptor, and ends when that closes, however that comes.
"""

import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection

from model_server.errors import ModelServerError
from model_server.model_runner import ModelRunner, load_runner
from model_server.parallel.ranks import Ranks
from model_server.parallel.workers import Answer, Order, encode, read_order, read_start

logger = logging.getLogger(__name__)

_EXIT_FAILED = 1
_NOTICE_MS = 1000
_METHODS = frozenset(
    ("join", "execute", "store", "restore", "settle", "fence", "allocate_kv", "allocate_host", "free_kv")
)
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
        # What others break by ending is no fault of this rank's.
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
