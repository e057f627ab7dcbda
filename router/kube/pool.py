"""From an InferencePool, its InferenceObjectives and InferenceModelRewrites to what they say. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from router.kube.config import POOL_GROUP, selector_of
from router.kube.objects import (
    BadObjectError,
    ObjectiveObject,
    OldPoolObject,
    PoolObject,
    PoolReference,
    RewriteObject,
)
from router.rewrite import RewriteRule

_EXACT = "Exact"


@dataclass(frozen=True, slots=True)
class Pool:
    """An InferencePool: its label selector and target ports; Events are tied to it by `uid`."""

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


@dataclass(frozen=True, slots=True)
class PoolName:
    """The pool that objectives and rewrites must be for."""

    group: str
    name: str

    def is_meant(self, reference: PoolReference) -> bool:
        """Whether a poolRef means this pool; what it leaves out is as its definition's defaults."""
        kind = reference.kind or "InferencePool"
        group = POOL_GROUP if reference.group is None else reference.group
        return (group, kind, reference.name) == (self.group, "InferencePool", self.name)


@dataclass(frozen=True, slots=True)
class Rewrites:
    """The rules of all rewrites, the oldest object's first; by object, what cannot mean what it says."""

    rules: Sequence[RewriteRule] = ()
    complaints: Mapping[str, str] = field(default_factory=dict)


def priorities_of(objects: Iterable[ObjectiveObject], pool: PoolName) -> dict[str, int]:
    """Priority by objective."""
    return {
        objective.metadata.name: objective.spec.priority or 0
        for objective in objects
        if pool.is_meant(objective.spec.pool_ref) and objective.metadata.deletion_timestamp is None
    }


def rewrites_of(objects: Iterable[RewriteObject], pool: PoolName) -> Rewrites:
    """All rules; of objects of one age, those of the first name first."""
    rules: list[RewriteRule] = []
    complaints: dict[str, str] = {}
    meant = (
        rewrite
        for rewrite in objects
        if pool.is_meant(rewrite.spec.pool_ref) and rewrite.metadata.deletion_timestamp is None
    )
    # Times are written so that their order is that of their text.
    for rewrite in sorted(meant, key=lambda one: (one.metadata.creation_timestamp or "", one.metadata.name)):
        for number, rule in enumerate(rewrite.spec.rules):
            targets = [(target.model_rewrite, target.weight) for target in rule.targets]
            models = [match.model for match in rule.matches or ()]
            other = next((model.type for model in models if model.type not in (None, _EXACT)), None)
            if other is not None:
                complaints[rewrite.metadata.name] = f"rules[{number}]: matches are of type {_EXACT} only"
                continue
            if len({weight is None for _, weight in targets}) > 1:
                complaints[rewrite.metadata.name] = (
                    f"rules[{number}]: only some targets have a weight; those without are never used"
                )
            rules.append(RewriteRule(frozenset(model.value for model in models), targets))
    return Rewrites(rules, complaints)
