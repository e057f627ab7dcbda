"""Settings of discovery in Kubernetes: flags in, one checked KubeConfig out."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from common.flags import flag, flag_values, port
from indexer.config import DEFAULT_EVENTS_PORT, RANKS_MAX
from router.config.flags import positive_duration
from router.errors import ConfigError

POOL_GROUP = "inference.networking.k8s.io"
OLD_GROUP = "inference.networking.x-k8s.io"
LLMD_GROUP = "llm-d.ai"

POOL_VERSIONS = {POOL_GROUP: "v1", OLD_GROUP: "v1alpha2"}
"""The version of InferencePool that is read, by group."""

PORTS_MAX = 8
"""Target ports of a pool."""

_PORT_MAX = 65_535 - RANKS_MAX


def _selector(text: str) -> str:
    # Whether it is one, the API server says.
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty, which would select every pod of the namespace")
    return text.strip()


def _ports(text: str) -> tuple[int, ...]:
    ports = tuple(port(item.strip()) for item in text.split(","))
    if len(set(ports)) != len(ports) or len(ports) > PORTS_MAX or not all(ports):
        raise argparse.ArgumentTypeError(f"must be 1 to {PORTS_MAX} different ports, not {text!r}")
    return ports


def _engine_port(text: str) -> int:
    number = port(text)
    if number > _PORT_MAX:
        raise argparse.ArgumentTypeError(f"must be at most {_PORT_MAX}, so that there is room for ranks")
    return number


_GROUP = "pods in Kubernetes"
_flag = partial(flag, _GROUP)


@dataclass(frozen=True, slots=True)
class KubeConfig:
    """Source of pods: a pool, or `selector`."""

    pool: str = _flag(
        "--pool-name",
        str,
        "",
        "InferencePool whose pods are used; with file discovery its name",
        metavar="NAME",
    )
    pool_group: str = _flag(
        "--pool-group",
        str,
        POOL_GROUP,
        "API group of the InferencePool (default: %(default)s)",
        choices=tuple(POOL_VERSIONS),
        metavar=None,
    )
    namespace: str = _flag(
        "--pool-namespace",
        str,
        "",
        "of the pool and its pods (default: POD_NAMESPACE, else that of the credentials)",
        metavar="NAMESPACE",
    )
    selector: str = _flag(
        "--endpoint-selector",
        _selector,
        "",
        'label selector of the pods where there is no InferencePool: "app=x,role in (a,b)"',
        metavar="SELECTOR",
    )
    target_ports: tuple[int, ...] = _flag(
        "--endpoint-target-ports",
        _ports,
        (),
        f"serving ports of these pods, at most {PORTS_MAX}",
        metavar="PORT[,PORT]",
    )
    events_port: int = _flag(
        "--kv-events-port",
        _engine_port,
        DEFAULT_EVENTS_PORT,
        "where engines publish KV events, + 1 for each further target port; pods may be annotated otherwise",
    )
    replay_port: int = _flag(
        "--kv-replay-port", _engine_port, DEFAULT_EVENTS_PORT + 1, "where they answer replays; 0: nowhere"
    )
    events_bind: bool = False  # whether pods may connect to us instead
    kubeconfig: Path | None = flag(
        _GROUP,
        "--kubeconfig",
        Path,
        None,
        "credentials (default: the pod's service account, else ~/.kube/config)",
        metavar="PATH",
    )
    deadline_s: float = _flag(
        "--kube-deadline",
        positive_duration,
        300.0,
        "a watch that is silent for so long is taken for dead (default: 5m)",
        metavar="DURATION",
    )


def kube_config(flags: argparse.Namespace) -> KubeConfig | None:
    """What the flags say; None where pods are not found in Kubernetes.

    Raises:
        ConfigError: They contradict each other.
    """
    config = KubeConfig(**flag_values(KubeConfig, flags), events_bind=flags.events_bind is not None)
    if config.pool and config.selector:
        raise ConfigError("give either --pool-name or --endpoint-selector")
    if bool(config.selector) != bool(config.target_ports):
        raise ConfigError("--endpoint-selector and --endpoint-target-ports go together; a pool has its own")
    return config if config.pool or config.selector else None
