"""What discovery in Kubernetes is told; values only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from indexer.config import DEFAULT_EVENTS_PORT

POOL_GROUP = "inference.networking.k8s.io"
OLD_GROUP = "inference.networking.x-k8s.io"
LLMD_GROUP = "llm-d.ai"

POOL_VERSIONS = {POOL_GROUP: "v1", OLD_GROUP: "v1alpha2"}
"""The version of InferencePool that is read, by group."""

PORTS_MAX = 8
"""Target ports of a pool."""


@dataclass(frozen=True, slots=True)
class KubeConfig:
    """Where pods are found.

    Attributes:
        pool: Name of the InferencePool; "": pods are found by `selector`.
        pool_group: API group of the pool.
        namespace: Of the pool and its pods; "": see `KubeClient.namespace`.
        selector: Label selector of the pods where there is no pool.
        target_ports: Serving ports of these pods.
        events_port: Where engines publish that do not tell; + 1 for each further target port.
        replay_port: Where they answer replays; 0: nowhere.
        events_bind: Whether pods may connect to us instead.
        kubeconfig: None: the pod's service account, else the user's own.
        deadline_s: A watch that is silent for so long is taken for dead.
    """

    pool: str = ""
    pool_group: str = POOL_GROUP
    namespace: str = ""
    selector: str = ""
    target_ports: tuple[int, ...] = ()
    events_port: int = DEFAULT_EVENTS_PORT
    replay_port: int = DEFAULT_EVENTS_PORT + 1
    events_bind: bool = False
    kubeconfig: Path | None = None
    deadline_s: float = 300.0
