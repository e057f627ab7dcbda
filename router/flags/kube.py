"""Flags that say where in Kubernetes pods are found: arguments in, one KubeConfig out."""

from __future__ import annotations

import argparse
from pathlib import Path

from indexer.config import DEFAULT_EVENTS_PORT, RANKS_MAX
from router.errors import ConfigError
from router.flags.values import port, positive_duration
from router.kube.config import POOL_GROUP, POOL_VERSIONS, PORTS_MAX, KubeConfig
from router.kube.selector import checked_selector

_PORT_MAX = 65_535 - RANKS_MAX


def add_kube_flags(group: argparse._ArgumentGroup) -> None:
    """Adds the flags of this group."""
    group.add_argument(
        "--pool-name",
        default="",
        metavar="NAME",
        help="InferencePool whose pods are used; with file discovery its name",
    )
    group.add_argument(
        "--pool-namespace",
        default="",
        metavar="NAMESPACE",
        help="of the pool and its pods (default: POD_NAMESPACE, else that of the credentials)",
    )
    group.add_argument(
        "--pool-group",
        choices=tuple(POOL_VERSIONS),
        default=POOL_GROUP,
        help="API group of the InferencePool (default: %(default)s)",
    )
    group.add_argument(
        "--endpoint-selector",
        type=_selector,
        metavar="SELECTOR",
        help='label selector of the pods where there is no InferencePool: "app=x,role in (a,b)"',
    )
    group.add_argument(
        "--endpoint-target-ports",
        type=_ports,
        default=(),
        metavar="PORT[,PORT]",
        help=f"serving ports of these pods, at most {PORTS_MAX}",
    )
    group.add_argument(
        "--kv-events-port",
        type=_engine_port,
        default=DEFAULT_EVENTS_PORT,
        metavar="PORT",
        help="where engines publish KV events, + 1 for each further target port; pods may be annotated "
        "otherwise (default: %(default)s)",
    )
    group.add_argument(
        "--kv-replay-port",
        type=_engine_port,
        default=DEFAULT_EVENTS_PORT + 1,
        metavar="PORT",
        help="where they answer replays; 0: nowhere (default: %(default)s)",
    )
    group.add_argument(
        "--kubeconfig",
        type=Path,
        metavar="PATH",
        help="credentials (default: the pod's service account, else ~/.kube/config)",
    )
    group.add_argument(
        "--kube-deadline",
        type=positive_duration,
        default="5m",
        metavar="DURATION",
        help="a watch that is silent for so long is taken for dead (default: %(default)s)",
    )


def kube_config(flags: argparse.Namespace) -> KubeConfig | None:
    """What the flags say; None where pods are not found in Kubernetes.

    Raises:
        ConfigError: They contradict each other.
    """
    if flags.pool_name and flags.endpoint_selector:
        raise ConfigError("give either --pool-name or --endpoint-selector")
    if bool(flags.endpoint_selector) != bool(flags.endpoint_target_ports):
        raise ConfigError("--endpoint-selector and --endpoint-target-ports go together; a pool has its own")
    if not (flags.pool_name or flags.endpoint_selector):
        return None
    return KubeConfig(
        pool=flags.pool_name,
        pool_group=flags.pool_group,
        namespace=flags.pool_namespace,
        selector=flags.endpoint_selector or "",
        target_ports=flags.endpoint_target_ports,
        events_port=flags.kv_events_port,
        replay_port=flags.kv_replay_port,
        events_bind=flags.events_bind is not None,
        kubeconfig=flags.kubeconfig,
        deadline_s=flags.kube_deadline,
    )


def _selector(text: str) -> str:
    try:
        return checked_selector(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


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
