"""A small process supervisor: plans in, running children out; none outlives it, whatever happens.

Knows processes, ports and log files; knows nothing of what the children do.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import urllib3

from router.local import tether
from router.local.errors import ChildDiedError, LocalStackError, PortInUseError
from router.local.stack import HOST, ChildPlan

READY_TIMEOUT_S = 120.0
_POLL_S = 0.05


@dataclass(slots=True)
class Child:
    """A running process of the plan."""

    plan: ChildPlan
    process: subprocess.Popen[bytes]
    log_path: Path
    ready: bool = False


def check_ports(ports: Iterable[int]) -> None:
    """Makes sure that each port can be bound.

    Raises:
        PortInUseError: Naming the first that cannot.
    """
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError as error:
                raise PortInUseError(
                    f"port {port} is in use ({error.strerror}); stop what holds it, or choose others with "
                    "--port n or make's PORT=n (gateway), --base-port n or BASE_PORT=n (the rest)"
                ) from error


class Supervisor:
    """Starts children in order, watches them, and stops them all in reverse order.

    Args:
        directory: Where the children's log files go.
        say: Shows one line of progress.
        stop_timeout_s: How long a child may take to end after SIGTERM.
    """

    def __init__(self, directory: Path, say: Callable[[str], None], *, stop_timeout_s: float = 8.0) -> None:
        self._directory = directory
        self._say = say
        self._stop_timeout_s = stop_timeout_s
        self.children: list[Child] = []
        self.died = False
        """Whether a child died while it should have run; the stack may have gone on since."""

    def start(self, plans: Sequence[ChildPlan]) -> None:
        """Starts all plans at once, then waits until every one is ready, in order.

        Raises:
            ChildDiedError: One ended before it was ready.
            LocalStackError: One is not ready after `READY_TIMEOUT_S`.
        """
        for plan in plans:
            self.children.append(self._spawn(plan))
        for child in self.children:
            self._wait_ready(child)
            self._mark_ready(child)

    def check(self) -> None:
        """Looks after the children once; a restartable one that died is started anew.

        Raises:
            ChildDiedError: A child died that the stack cannot do without, or one that keeps dying.
        """
        for at, child in enumerate(self.children):
            if child.process.poll() is None:
                if not child.ready and _is_ready(child.plan):
                    self._mark_ready(child)
                continue
            self.died = True
            # One that dies before it is ready again will not get better by a third try.
            if not (child.plan.restarts and child.ready):
                raise ChildDiedError(_obituary(child))
            self._say(f"{_obituary(child)}; starting it anew on the same ports, the others go on")
            self.children[at] = self._spawn(child.plan)

    def stop(self) -> None:
        """Ends every child: SIGTERM in reverse order, SIGKILL for those that stay."""
        alive = [child for child in reversed(self.children) if child.process.poll() is None]
        for child in alive:
            with contextlib.suppress(ProcessLookupError):
                child.process.terminate()
        deadline_s = time.monotonic() + self._stop_timeout_s
        for child in alive:
            try:
                child.process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._say(f"{child.plan.name} does not stop; killing it")
                child.process.kill()
                child.process.wait()
        self.children.clear()

    def _mark_ready(self, child: Child) -> None:
        child.ready = True
        self._say(f"{child.plan.name} is ready (pid {child.process.pid})")

    def _spawn(self, plan: ChildPlan) -> Child:
        log_path = self._directory / f"{plan.name}.log"
        with log_path.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-I", tether.__file__, str(os.getpid()), *plan.argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # A session of its own: Ctrl-C reaches only us, and we stop the children in order.
                start_new_session=True,
            )
        return Child(plan, process, log_path)

    def _wait_ready(self, child: Child) -> None:
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while not _is_ready(child.plan):
            for other in self.children:
                if other.process.poll() is not None:
                    raise ChildDiedError(_obituary(other))
            if time.monotonic() > deadline_s:
                raise LocalStackError(
                    f"{child.plan.name} is not ready after {READY_TIMEOUT_S:.0f} s; {_last_words(child)}"
                )
            time.sleep(_POLL_S)


def _is_ready(plan: ChildPlan) -> bool:
    if plan.ready_url is None:
        with socket.socket() as probe:
            return probe.connect_ex((HOST, plan.ports[0])) == 0
    try:
        return urllib3.request("GET", plan.ready_url, timeout=2.0, retries=False).status == 200
    except urllib3.exceptions.HTTPError:
        return False


def _obituary(child: Child) -> str:
    code = child.process.poll()
    how = (
        f"was killed by {signal.Signals(-code).name}"
        if code is not None and code < 0
        else f"exited with {code}"
    )
    return f"{child.plan.name} {how}; {_last_words(child)}"


def _last_words(child: Child) -> str:
    with child.log_path.open("rb") as log:
        lines = deque((line.strip() for line in log if line.strip()), maxlen=1)
    return f"it last said: {lines[0].decode(errors='replace')[:300]}" if lines else "it said nothing"
