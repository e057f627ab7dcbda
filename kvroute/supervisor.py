"""Process supervisor: starts, watches, restarts and stops child processes. No child outlives it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import urllib3

from kvroute import parent_death
from kvroute.stack import HOST, ChildPlan, LocalStackError

READY_TIMEOUT_S = 300.0  # slow machines compile the kernels for minutes
BACK_OFF_S = (0.0, 0.5, 1.0, 2.0, 4.0)
"""Delays in seconds before restarts within `RESTARTS_WITHIN_S`; one more exit ends the stack."""
RESTARTS_WITHIN_S = 60.0
_POLL_S = 0.05
_LAST_LINES, _LAST_BYTES = 3, 4096


@dataclass(slots=True)
class Child:
    """Running process of a plan."""

    plan: ChildPlan
    process: subprocess.Popen[bytes]
    log_path: Path
    log_start: int  # size of the log file before this process wrote to it
    deaths_s: list[float] = field(default_factory=list)  # times of exits that led to a restart, oldest first
    restart_at_s: float | None = None  # None: no restart is scheduled
    ready: bool = False


def check_ports(ports: Iterable[int]) -> None:
    """Check that each port can be bound; raises a LocalStackError if one is in use."""
    for port in ports:
        try:
            socket.create_server((HOST, port)).close()
        except OSError as error:
            raise LocalStackError(
                f"port {port} is in use ({error.strerror}); stop its owner, or choose others with "
                "--port n or make's PORT=n (gateway), --base-port n or BASE_PORT=n (the rest)"
            ) from error


class Supervisor:
    """Supervisor of child processes, which are stopped in reverse order.

    Args:
        directory: Directory of the log files.
        say: Prints a progress line.
        stop_timeout_s: Time for a child to exit after SIGTERM, before SIGKILL.
        back_off_s: See `BACK_OFF_S`.
        progress_s: Time after which a child that is not ready is named, again and again, with its log's end.
    """

    def __init__(
        self,
        directory: Path,
        say: Callable[[str], None],
        *,
        stop_timeout_s: float = 8.0,
        back_off_s: Sequence[float] = BACK_OFF_S,
        progress_s: float = 5.0,
    ) -> None:
        self._directory = directory
        self.say = say
        self._stop_timeout_s = stop_timeout_s
        self._back_off_s, self._progress_s = back_off_s, progress_s
        self.children: list[Child] = []
        self.restarted: list[str] = []
        """Names of children that exited unexpectedly, one for each restart."""

    def start(self, plans: Sequence[ChildPlan]) -> None:
        """Start all plans at once and wait until each is ready; raises a LocalStackError if one is not."""
        for plan in plans:
            self.children.append(self._spawn(plan))
        for child in self.children:
            self._wait_ready(child)
            self._mark_ready(child)

    def check(self) -> None:
        """Restart exited children whose delay has passed. Call it several times per second.

        Raises:
            LocalStackError: A child exited too often.
        """
        for at, child in enumerate(self.children):
            if child.process.poll() is None:
                if not child.ready and _is_ready(child.plan):
                    self._mark_ready(child)
                continue
            now_s = time.monotonic()
            if child.restart_at_s is None:
                child.restart_at_s = now_s + self._restart_delay_s(child, now_s)
            if now_s >= child.restart_at_s:
                self.children[at] = self._spawn(child.plan, child.deaths_s)

    def stop(self) -> None:
        """Stop every child: SIGTERM in reverse order, SIGKILL after the timeout."""
        alive = [child for child in reversed(self.children) if child.process.poll() is None]
        for child in alive:
            with contextlib.suppress(ProcessLookupError):
                child.process.terminate()
        deadline_s = time.monotonic() + self._stop_timeout_s
        for child in alive:
            try:
                child.process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.say(f"{child.plan.name} does not stop; sending SIGKILL")
                child.process.kill()
                child.process.wait()
        self.children.clear()

    def _restart_delay_s(self, child: Child, now_s: float) -> float:
        child.deaths_s = [death_s for death_s in child.deaths_s if now_s - death_s < RESTARTS_WITHIN_S]
        restarts = len(child.deaths_s)
        if restarts == len(self._back_off_s):
            raise LocalStackError(
                f"{_exit_text(child)}; it was restarted {restarts} times within {RESTARTS_WITHIN_S:.0f} s"
            )
        child.deaths_s.append(now_s)
        self.restarted.append(child.plan.name)
        delay_s = self._back_off_s[restarts]
        self.say(f"{_exit_text(child)}; restarting it on the same ports in {delay_s:g} s")
        return delay_s

    def _mark_ready(self, child: Child) -> None:
        child.ready = True
        self.say(f"{child.plan.name} is ready (pid {child.process.pid})")

    def _spawn(self, plan: ChildPlan, deaths_s: list[float] | None = None) -> Child:
        log_path = self._directory / f"{plan.name}.log"
        with log_path.open("ab") as log:
            log_start = log.seek(0, os.SEEK_END)
            process = subprocess.Popen(
                [sys.executable, "-I", parent_death.__file__, str(os.getpid()), *plan.argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # In its own session a child does not receive Ctrl-C; `stop` ends children in order.
                start_new_session=True,
            )
        return Child(plan, process, log_path, log_start, deaths_s or [])

    def _wait_ready(self, child: Child) -> None:
        told_s = time.monotonic()
        deadline_s = told_s + READY_TIMEOUT_S
        while not _is_ready(child.plan):
            if time.monotonic() - told_s > self._progress_s:
                told_s = time.monotonic()
                self.say(f"waiting for {child.plan.name}; {_log_text(child)}")
            for other in self.children:
                if other.process.poll() is not None:
                    raise LocalStackError(_exit_text(other))
            if time.monotonic() > deadline_s:
                raise LocalStackError(
                    f"{child.plan.name} is not ready after {READY_TIMEOUT_S:.0f} s; {_log_text(child)}"
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


def _exit_text(child: Child) -> str:
    code = child.process.wait()  # returns at once
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
    return f"{child.plan.name} {how}; {_log_text(child)}"


def _log_text(child: Child) -> str:
    with child.log_path.open("rb") as log:
        size = log.seek(0, os.SEEK_END)
        log.seek(max(child.log_start, size - _LAST_BYTES))
        lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    return f"last log lines: {' | '.join(lines[-_LAST_LINES:])[-900:]}" if lines else "its log is empty"
