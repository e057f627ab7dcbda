"""uvicorn as this server runs it: its settings, its life from listening to a stop, and nothing in between.

In: an ASGI application and bound sockets. Out: answers. It leaves signals to its caller, whom it tells when
it is ready, and whom it asks whether to go on.
"""

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import uvicorn
from starlette.types import ASGIApp

from model_server.errors import StartError
from model_server.http_protocol import ModelServerProtocol

logger = logging.getLogger(__name__)

# After `stop`, running requests get this long to finish before they are ended.
GRACE_S = 2.0
_ABORT_S = 1
# Longer than common proxies keep idle connections, so that it is they who close them.
_KEEP_ALIVE_S = 120
_BACKLOG = 2048
_LOOK_S = 1.0  # also how often answers get a new date


class HttpServer(uvicorn.Server):
    """Serves one application.

    Args:
        app: The application.
        on_ready: Called once connections are taken.
        alive: Asked once a second; the server ends when it is no longer so.
    """

    def __init__(self, app: ASGIApp, on_ready: Callable[[], None], alive: Callable[[], bool]) -> None:
        config = uvicorn.Config(
            app,
            http=ModelServerProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(GRACE_S) + _ABORT_S,
        )
        super().__init__(config)
        self._on_ready = on_ready
        self._alive = alive
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Accept nothing more, and end once running requests have; called on the loop."""
        self.should_exit = True
        self._stopping.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen.

        Raises:
            StartError: The sockets cannot listen.
        """
        try:
            await super().startup(sockets)
        except OSError as error:
            raise StartError(f"cannot listen: {error.strerror or error}") from error
        self._on_ready()

    async def main_loop(self) -> None:
        """Wait for the end. uvicorn's own loop wakes ten times a second, which costs as much as tokens do."""
        while not await self.on_tick(0) and self._alive():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), _LOOK_S)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone: uvicorn's own handling would end the process with the signal's exit code."""
        yield

    @contextmanager
    def stopped_by_signals(self, stop: Callable[[], None]) -> Iterator[None]:
        """Call `stop` on SIGTERM and SIGINT, where this thread may handle signals."""
        loop = asyncio.get_running_loop()
        try:
            for signal_number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(signal_number, stop)
        except (ValueError, RuntimeError):
            logger.debug("not the main thread: signals are someone else's")
        yield
