"""Signs that a pool's engines have a KV connector: settings and pods in, the sign out. No I/O."""

from __future__ import annotations

from router.config import RouterConfig
from router.plugins.labels import ROLE_LABEL
from router.pods import PodSnapshot

# Plugins that split a request over engines, which hand its blocks on.
_HANDLERS = frozenset({"disagg-profile-handler", "pd-profile-handler", "disagg-headers-handler"})


def connector_sign(config: RouterConfig, pods: PodSnapshot) -> str | None:
    """Return why engines are taken to have a KV connector; None: nothing says that they have one."""
    if config.kv_connector != "auto":
        return "--kv-connector=true" if config.kv_connector == "true" else None
    for entry in config.picker.plugins.values() if config.picker is not None else ():
        if entry.type in _HANDLERS:
            return f"plugin {entry.type}"
    for pod in pods.values():
        if ROLE_LABEL in pod.entry.labels:
            return f"label {ROLE_LABEL} of pod {pod.name}"
    return None
