"""A few threads for tokenizing that may take long: a function in, its result out within a deadline, or none.

What is late goes on to its end; what finds the queue full is not taken. Knows no requests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

_T = TypeVar("_T")


class PoolFullError(Exception):
    """As many functions wait as may."""


class TokenizerPool:
    """Threads with a bounded queue; safe to call from any thread.

    Args:
        threads: Functions that run at once.
        waiting_max: Functions that may wait for a thread.
    """

    def __init__(self, threads: int, waiting_max: int) -> None:
        self._executor = ThreadPoolExecutor(threads, "tokenize")
        self._places = threading.BoundedSemaphore(threads + waiting_max)

    def run(self, work: Callable[[], _T], timeout_s: float) -> _T:
        """Runs a function on a thread of the pool and waits for its result.

        Raises:
            TimeoutError: It takes longer; it is not stopped.
            PoolFullError: The queue is full, or the pool closed; the function has not run.
            Exception: Whatever the function raises.
        """
        if not self._places.acquire(blocking=False):
            raise PoolFullError
        try:
            future: Future[_T] = self._executor.submit(work)
        except RuntimeError as error:
            self._places.release()
            raise PoolFullError from error
        # Also called for what is cancelled before it ran.
        future.add_done_callback(lambda _: self._places.release())
        return future.result(timeout_s)

    def close(self) -> None:
        """Takes no more; what waits is dropped, what runs ends by itself."""
        self._executor.shutdown(wait=False, cancel_futures=True)
