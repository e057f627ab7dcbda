"""Flags of discovery in Kubernetes, parsed to a KubeConfig."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from common.flags import file_flag, flag, flag_values, pair, port
from indexer.config import DEFAULT_EVENTS_PORT, RANKS_MAX
from router.config.flags import positive_duration
from router.errors import ConfigError

POOL_GROUP = "inference.networking.k8s.io"
OLD_GROUP = "inference.networking.x-k8s.io"
LLMD_GROUP = "llm-d.ai"

POOL_VERSIONS = {POOL_GROUP: "v1", OLD_GROUP: "v1alpha2"}  # supported version of InferencePool by API group
PORTS_MAX = 8  # maximum number of target ports of a pool
# Largest port of events, which leaves room for those of data-parallel ranks.
EVENT_PORT_MAX = 65_535 - RANKS_MAX


def _selector(text: str) -> str:
    # The API server checks the syntax.
    if not text.strip():
        raise argparse.ArgumentTypeError("must not be empty: it would select every pod of the namespace")
    return text.strip()


def _ports(text: str) -> tuple[int, ...]:
    ports = tuple(port(item.strip()) for item in text.split(","))
    if len(set(ports)) != len(ports) or len(ports) > PORTS_MAX or not all(ports):
        raise argparse.ArgumentTypeError(f"must be 1 to {PORTS_MAX} different ports, not {text!r}")
    return ports


def _engine_port(text: str) -> int:
    number = port(text)
    if number > EVENT_PORT_MAX:
        raise argparse.ArgumentTypeError(f"must be at most {EVENT_PORT_MAX}, to leave room for DP ranks")
    return number


_GROUP = "pods in Kubernetes"
_flag = partial(flag, _GROUP)


@dataclass(frozen=True, slots=True)
class KubeConfig:
    """Configuration of discovery in Kubernetes, by InferencePool or by label selector."""

    pool: str = _flag(
        "--pool-name",
        str,
        "",
        "InferencePool whose pods are used; with file discovery its name",
        metavar="NAME",
    )
    more_pools: tuple[tuple[str, int], ...] = _flag(
        "--pool-port",
        pair(port),
        (),
        "further InferencePool, and the gRPC port whose requests go to its pods; may be repeated",
        action="append",
        metavar="NAME=PORT",
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
        "namespace of the pool and its pods (default: POD_NAMESPACE, else that of the credentials)",
        metavar="NAMESPACE",
    )
    selector: str = _flag(
        "--endpoint-selector",
        _selector,
        "",
        'label selector of the pods, without an InferencePool: "app=x,role in (a,b)"',
        metavar="SELECTOR",
    )
    target_ports: tuple[int, ...] = _flag(
        "--endpoint-target-ports",
        _ports,
        (),
        f"serving ports of the selected pods, at most {PORTS_MAX}",
        metavar="PORT[,PORT]",
    )
    events_port: int = _flag(
        "--kv-events-port",
        _engine_port,
        DEFAULT_EVENTS_PORT,
        "port of KV events, + 1 for each further target port; a pod's annotations override it",
    )
    replay_port: int = _flag(
        "--kv-replay-port", _engine_port, DEFAULT_EVENTS_PORT + 1, "port of replay requests; 0: no replay"
    )
    events_bind: bool = False  # whether engines may connect to the router's --events-bind socket instead
    kubeconfig: Path | None = file_flag(
        _GROUP,
        "--kubeconfig",
        "credentials (default: the pod's service account, else ~/.kube/config)",
        metavar="PATH",
    )
    deadline_s: float = _flag(
        "--kube-deadline",
        positive_duration,
        300.0,
        "reconnect a watch that has been silent for this long (default: 5m)",
        metavar="DURATION",
    )

    @property
    def pools(self) -> tuple[str, ...]:
        """Names of all InferencePools, that of --pool-name first."""
        return (self.pool, *(name for name, _ in self.more_pools)) if self.pool else ()


def kube_config(flags: argparse.Namespace) -> KubeConfig | None:
    """Build the configuration from parsed flags; None if they select no pods in Kubernetes.

    Raises:
        ConfigError: The flags contradict each other.
    """
    config = KubeConfig(**flag_values(KubeConfig, flags), events_bind=flags.events_bind is not None)
    if config.pool and config.selector:
        raise ConfigError("give either --pool-name or --endpoint-selector, not both")
    if config.more_pools and not config.pool:
        raise ConfigError("--pool-port: names a further pool; give the first one by --pool-name")
    if len(set(config.pools)) < len(config.pools):
        raise ConfigError("--pool-port: names a pool twice, or that of --pool-name")
    if bool(config.selector) != bool(config.target_ports):
        raise ConfigError(
            "--endpoint-selector and --endpoint-target-ports must be given together; a pool defines both"
        )
    return config if config.pool or config.selector else None
