"""From an InferencePool object to what it says of its pods. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from router.kube.objects import BadObjectError, OldPoolObject, PoolObject
from router.kube.selector import selector_of


@dataclass(frozen=True, slots=True)
class Pool:
    """An InferencePool.

    Attributes:
        uid: By which Events are tied to it.
        selector: Label selector of its pods.
        ports: Its target ports.
    """

    name: str
    uid: str
    selector: str
    ports: tuple[int, ...]


def pool_of(pool: PoolObject | OldPoolObject) -> Pool | None:
    """What the pool says; None while it is being deleted.

    Raises:
        BadObjectError: It cannot be used.
    """
    metadata = pool.metadata
    if metadata.deletion_timestamp is not None:
        return None
    if isinstance(pool, OldPoolObject):
        labels = pool.spec.selector
        ports: tuple[int, ...] = (pool.spec.target_port_number,)
    else:
        labels = pool.spec.selector.match_labels
        ports = tuple(dict.fromkeys(port.number for port in pool.spec.target_ports))
    try:
        return Pool(metadata.name, metadata.uid, selector_of(labels), ports)
    except ValueError as error:
        raise BadObjectError(f"spec.selector: {error}") from error
