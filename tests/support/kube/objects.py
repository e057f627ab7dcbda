"""Kubernetes objects in the form of the API server, for tests of discovery."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st
from msgspec import Raw

from router.pods.kube.objects import PodObject, read

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)
"""Any JSON value."""


def raw(value: object) -> Raw:
    """Return a value as raw JSON."""
    return Raw(json.dumps(value).encode())


def pod_json(name: str = "a", *, address: str | None = "10.0.0.1", ready: bool = True, **fields: Any) -> Any:
    """Return a running pod; fields replace or add to its metadata and status by name."""
    metadata = {"name": name, "namespace": "test", "uid": f"uid-{name}", "labels": {"app": "x"}}
    status: dict[str, Any] = {
        "phase": "Running",
        "conditions": [{"type": "Ready", "status": str(ready)}],
        "containerStatuses": [{"name": "engine", "restartCount": 0, "containerID": "containerd://1"}],
    }
    if address is not None:
        status["podIP"] = address
    for name_of_field, value in fields.items():
        (status if name_of_field in ("phase", "conditions", "containerStatuses") else metadata)[
            name_of_field
        ] = value
    return {"metadata": metadata, "status": status}


def pod(name: str = "a", **fields: Any) -> PodObject:
    """Return a parsed pod."""
    return read(raw(pod_json(name, **fields)), PodObject)
