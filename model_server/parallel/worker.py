"""One rank above 0 as a process: `python -m model_server.parallel.worker FILE_DESCRIPTOR`.

In: orders over the connection with this descriptor. Out: the rank's part of every step, and nothing else: it
knows neither requests nor tokens that were chosen. It ends when the connection closes, however that comes.
"""

import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from model_server.block_copies import BlockCopies, Transfer
from model_server.block_copies import Done as CopyDone
from model_server.errors import ModelServerError
from model_server.lora import LoraAdapter
from model_server.parallel.messages import (
    AllocateKv,
    Done,
    Failed,
    Fence,
    FreeKv,
    Join,
    LoadAdapter,
    NewCopies,
    Order,
    Restore,
    Run,
    Settle,
    Start,
    Store,
    encode,
    read_order,
    unpack,
)
from model_server.parallel.ranks import Ranks
from model_server.shard import load_shard

logger = logging.getLogger(__name__)

_EXIT_FAILED = 1
_NOTICE_MS = 1000


class Worker:
    """Carries out orders.

    Args:
        connection: Where answers go.
        start: The first order.
    """

    def __init__(self, connection: Connection, start: Start) -> None:
        self._connection = connection
        self._ranks = Ranks(start.division)
        _, self._shard = load_shard(start.config, self._ranks)
        self._adapters: dict[int, LoraAdapter] = {}
        self._copies: BlockCopies | None = None
        self._transfers: dict[int, Transfer] = {}

    def carry_out(self, order: Order) -> None:
        """Do what rank 0 wants, and answer if it waits for that."""
        match order:
            case Run():
                for lora_id in order.dropped:
                    self._adapters.pop(lora_id, None)
                self._shard.forward(order.step(self._adapters))
            case Store() | Restore() | Fence() | Settle():
                self._move(order)
            case LoadAdapter():
                # Beside the steps, which others' requests wait for.
                threading.Thread(target=self._answer, args=(order,), daemon=True).start()
            case _:
                self._answer(order)

    def _move(self, order: Store | Restore | Fence | Settle) -> None:
        copies = self._copies
        assert copies is not None, "there is no memory to copy"
        match order:
            case Store(number, blocks, slots):
                self._begun(number, copies.store(unpack(blocks), unpack(slots)))
            case Restore(number, slots, blocks):
                self._begun(number, copies.restore(unpack(slots), unpack(blocks)))
            case Fence():
                copies.fence()
            case Settle(number):
                self._transfers.pop(number).wait()

    def _begun(self, number: int, transfer: Transfer) -> None:
        if not isinstance(transfer, CopyDone):
            self._transfers[number] = transfer

    def _answer(self, order: Order) -> None:
        try:
            text = self._ask(order)
        except Exception as error:
            self._connection.send_bytes(encode(Failed.of(error)))
        else:
            self._connection.send_bytes(encode(Done(text)))

    def _ask(self, order: Order) -> str:
        match order:
            case Join(rendezvous):
                self._ranks.join(Path(rendezvous), self._shard.model.device)
            case NewCopies(host_blocks):
                self._copies = self._shard.block_copies(host_blocks)
            case FreeKv():
                self._copies = None
                self._shard.free_kv()
            case AllocateKv():
                self._shard.allocate_kv()
            case LoadAdapter(directory, name, lora_id):
                adapter = self._shard.load_adapter(Path(directory), name, lora_id)
                self._adapters[lora_id] = adapter
                return adapter.content_hash
            case _:
                raise AssertionError(f"{type(order).__name__} is not answered")
        return ""


def main(arguments: Sequence[str]) -> int:
    """Take orders until the connection closes.

    Args:
        arguments: The connection's file descriptor.

    Returns:
        0 when rank 0 has closed the connection or is gone, 1 when this rank cannot go on.
    """
    # Whoever stops all processes at once still wants rank 0 to finish its requests.
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, signal.SIG_IGN)
    connection = Connection(int(arguments[0]))
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    try:
        start = read_order(connection.recv_bytes())
        assert isinstance(start, Start), "the first order starts the rank"
        logging.basicConfig(
            level=start.log_level,
            format=f"%(asctime)s %(levelname)s rank {start.division.rank}: %(name)s: %(message)s",
        )
        try:
            worker = Worker(connection, start)
        except ModelServerError as error:
            connection.send_bytes(encode(Failed.of(error)))
            return _EXIT_FAILED
        connection.send_bytes(encode(Done()))
        while True:
            worker.carry_out(read_order(connection.recv_bytes()))
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
