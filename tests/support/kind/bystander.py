"""A pod outside the release that is Ready, serves nothing, and tries connections on request."""

from __future__ import annotations

import json
from collections.abc import Mapping

from tests.support.kind.images import ROUTER
from tests.support.kind.tools import Kubectl

_NAME = "bystander"
_CONNECT = """
import json, socket, sys
opened = []
for address in sys.argv[1:]:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 3).close()
        opened.append(address)
    except OSError:
        pass
print(json.dumps(opened))
"""


def start_bystander(kubectl: Kubectl, labels: Mapping[str, str] | None = None) -> None:
    """Start the pod and wait until it is Ready."""
    container = {
        "name": _NAME,
        "image": ROUTER,
        "imagePullPolicy": "Never",
        "command": ["python", "-c", "import time; time.sleep(3600)"],
    }
    kubectl.apply(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": _NAME, "labels": dict(labels or {})},
            "spec": {"containers": [container], "terminationGracePeriodSeconds": 0},
        }
    )
    kubectl("wait", "--for=condition=Ready", f"pod/{_NAME}", "--timeout=120s")


def stop_bystander(kubectl: Kubectl) -> None:
    """Delete the pod."""
    kubectl("delete", "pod", _NAME, "--now", "--ignore-not-found")


def opens(kubectl: Kubectl, addresses: list[str]) -> list[str]:
    """Return which of these "host:port" addresses the pod can connect to."""
    found: list[str] = json.loads(kubectl("exec", _NAME, "--", "python", "-c", _CONNECT, *addresses))
    return found
