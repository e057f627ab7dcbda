"""Has a journal tell what it notes: at once, and what comes shortly after together; on its own thread."""

from __future__ import annotations

import logging
import threading
import time

from router.replicas.journal import Journal

_log = logging.getLogger(__name__)

# So that others have fewer messages to read where much comes.
_GATHER_S = 0.01


class Teller:
    """Tells for as long as it runs."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ledger-journal", daemon=True)

    def start(self) -> None:
        """Begins to tell."""
        self._thread.start()

    def close(self) -> None:
        """Tells no more; idempotent."""
        self._closing.set()
        self._journal.close()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._journal.wait()
            try:
                self._journal.tell()
            except Exception as error:
                if self._closing.is_set():
                    return
                # What they were told is no whole account any more.
                _log.exception("the routers that follow this one are told all anew")
                self._journal.end_all("behind", str(error))
            time.sleep(_GATHER_S)
