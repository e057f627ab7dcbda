"""The programs docker, kind, kubectl and helm as functions."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

TOOLS = ("docker", "kind", "kubectl", "helm")
_POLL_S = 0.25

_T = TypeVar("_T")


class ToolError(RuntimeError):
    """Error of a program that failed; the message has its command line and last output."""


def missing_tools() -> str | None:
    """Return why no cluster can be created here; None if one can."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)} on PATH"
    docker = subprocess.run(["docker", "info"], capture_output=True, text=True)
    if docker.returncode != 0:
        return f"needs a running docker daemon: {' '.join(docker.stderr.strip().splitlines()[-1:])}"
    return None


def run(*command: str, stdin: str | None = None, environment: Mapping[str, str] | None = None) -> str:
    """Run a program and return its standard output.

    Raises:
        ToolError: It failed.
    """
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        last_words = f"{done.stdout}\n{done.stderr}".strip()[-4000:]
        raise ToolError(f"{' '.join(command)} ended with {done.returncode}: {last_words}")
    return done.stdout


def eventually(what: str, probe: Callable[[], _T | None], *, deadline_s: float = 180.0) -> _T:
    """Call `probe` until it returns a true value, and return that value.

    Args:
        what: Description of the condition, for the message.
        probe: Called repeatedly; its ToolErrors are ignored until the deadline.
        deadline_s: Time limit in seconds.

    Raises:
        AssertionError: The time limit has passed.
    """
    end_s, last = time.monotonic() + deadline_s, ""
    while True:
        try:
            if found := probe():
                return found
        except ToolError as error:
            last = f"; the last error: {error}"
        if time.monotonic() > end_s:
            raise AssertionError(f"not within {deadline_s:.0f} s: {what}{last}")
        time.sleep(_POLL_S)


@dataclass(frozen=True, slots=True)
class Kubectl:
    """kubectl for one cluster and namespace."""

    kubeconfig: Path
    namespace: str = "default"

    def __call__(self, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl; see `run`."""
        return run("kubectl", *self._where(), *arguments, stdin=stdin)

    def get(self, *arguments: str) -> dict[str, Any]:
        """Return the output of `kubectl get` as JSON."""
        found: dict[str, Any] = json.loads(self("get", *arguments, "--output", "json"))
        return found

    def items(self, *arguments: str) -> list[dict[str, Any]]:
        """Return the objects that `kubectl get` lists."""
        found: list[dict[str, Any]] = self.get(*arguments)["items"]
        return found

    def apply(self, *objects: Mapping[str, Any]) -> None:
        """Create or change objects."""
        self("apply", "--filename", "-", stdin="\n---\n".join(map(json.dumps, objects)))

    def page(self, pod: str, port: int, path: str) -> str:
        """Return an HTTP page of a pod, through the API server's proxy."""
        return self("get", "--raw", f"/api/v1/namespaces/{self.namespace}/pods/{pod}:{port}/proxy{path}")

    def may(self, account: str, verb: str, resource: str, *, everywhere: bool = False) -> bool:
        """Return whether a service account of this namespace may do something, here or in all namespaces."""
        scope = ["--all-namespaces"] if everywhere else []
        command = ["kubectl", *self._where(), "auth", "can-i", verb, resource, *scope]
        name = f"system:serviceaccount:{self.namespace}:{account}"
        done = subprocess.run([*command, "--as", name], capture_output=True, text=True)
        if done.stdout.strip() not in ("yes", "no"):
            raise ToolError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout.strip() == "yes"

    def _where(self) -> Sequence[str]:
        return "--kubeconfig", str(self.kubeconfig), "--namespace", self.namespace
