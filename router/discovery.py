"""From a RouterConfig to where its pods come from."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry

from router.config import RouterConfig
from router.pods_source import PodsFile, PodsSource
from router.resources import Resources


def open_source(
    config: RouterConfig, registry: CollectorRegistry, take: Callable[[Resources], None]
) -> PodsSource:
    """Opens it.

    Args:
        take: Told objectives and rewrites, where the source tells them too, on any thread after its start.

    Raises:
        ConfigError: The pods file is wrong, or there are no credentials for a cluster.
    """
    if config.kube is None:
        assert config.pods_file is not None
        return PodsFile(config.pods_file, watch=config.watch_pods_file)
    # Only here: the official client takes about a second to import.
    from router.kube.source import KubeSource

    return KubeSource(config.kube, registry, take, rewrites=config.compat != "off")
