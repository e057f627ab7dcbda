"""Kubernetes objects as far as they are looked at: JSON bytes in, typed values out.

The one place where types are checked: what comes from the API server is hostile until it went through here.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Raw

_T = TypeVar("_T")

_Name = Annotated[str, Meta(min_length=1, max_length=253)]
_Port = Annotated[int, Meta(ge=1, le=65_535)]
_Int32 = Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)]


class BadObjectError(ValueError):
    """An object that cannot be read; the message says which field."""


class _Struct(msgspec.Struct, frozen=True, rename="camel"):
    """Fields that are not named are passed over."""


class Metadata(_Struct, frozen=True):
    """An object's metadata; null is as good as missing."""

    name: _Name
    uid: str = ""
    namespace: str = ""
    resource_version: str = ""
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class Head(_Struct, frozen=True):
    """Any object."""

    metadata: Metadata


class Counted(_Struct, frozen=True):
    """A Kubernetes Event's number of occurrences."""

    count: int | None = None


class Condition(_Struct, frozen=True):
    """One of a pod's conditions."""

    type: str
    status: str


class Container(_Struct, frozen=True):
    """State of one of a pod's containers."""

    name: str
    restart_count: int = 0
    container_id: str | None = msgspec.field(default=None, name="containerID")


class ProbedPort(_Struct, frozen=True):
    """Return the port, by number or name, that a probe asks."""

    port: int | str


class Probe(_Struct, frozen=True):
    """A probe of a container."""

    http_get: ProbedPort | None = None
    tcp_socket: ProbedPort | None = None
    grpc: ProbedPort | None = None


class ContainerPort(_Struct, frozen=True):
    """A port that a container declares."""

    container_port: int
    name: str | None = None


class ContainerSpec(_Struct, frozen=True):
    """Specification of one of a pod's containers."""

    ports: list[ContainerPort] | None = None
    readiness_probe: Probe | None = None


class PodSpec(_Struct, frozen=True):
    """Specification of a pod."""

    containers: list[ContainerSpec] | None = None


class PodStatus(_Struct, frozen=True):
    """A pod's status."""

    phase: str | None = None
    pod_ip: str | None = msgspec.field(default=None, name="podIP")
    conditions: list[Condition] | None = None
    container_statuses: list[Container] | None = None


class PodObject(_Struct, frozen=True):
    """A pod."""

    metadata: Metadata
    spec: PodSpec | None = None
    status: PodStatus | None = None


class MatchLabels(_Struct, frozen=True):
    """A selector of the v1 InferencePool."""

    match_labels: dict[str, str]


class TargetPort(_Struct, frozen=True):
    """A port of an InferencePool."""

    number: _Port


class PoolSpec(_Struct, frozen=True):
    """Specification of the v1 InferencePool."""

    selector: MatchLabels
    target_ports: Annotated[list[TargetPort], Meta(min_length=1, max_length=8)]


class PoolObject(_Struct, frozen=True):
    """An InferencePool of the group inference.networking.k8s.io."""

    metadata: Metadata
    spec: PoolSpec


class OldPoolSpec(_Struct, frozen=True):
    """Specification of the v1alpha2 InferencePool."""

    selector: dict[str, str]
    target_port_number: _Port


class OldPoolObject(_Struct, frozen=True):
    """An InferencePool of the group inference.networking.x-k8s.io."""

    metadata: Metadata
    spec: OldPoolSpec


class PoolReference(_Struct, frozen=True):
    """The pool that an objective or a rewrite is for."""

    name: _Name
    group: str | None = None
    kind: str | None = None


class ObjectiveSpec(_Struct, frozen=True):
    """Specification of an InferenceObjective."""

    pool_ref: PoolReference
    priority: _Int32 | None = None


class ObjectiveObject(_Struct, frozen=True):
    """An InferenceObjective."""

    metadata: Metadata
    spec: ObjectiveSpec


class ModelMatch(_Struct, frozen=True):
    """What a request's model is compared with."""

    value: Annotated[str, Meta(min_length=1)]
    type: str | None = None


class Match(_Struct, frozen=True):
    """One match of a rule."""

    model: ModelMatch


class Target(_Struct, frozen=True):
    """One target of a rule."""

    model_rewrite: str
    weight: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None


class Rule(_Struct, frozen=True):
    """One rule of a rewrite."""

    targets: Annotated[list[Target], Meta(min_length=1, max_length=1000)]
    matches: list[Match] | None = None


class RewriteSpec(_Struct, frozen=True):
    """Specification of an InferenceModelRewrite."""

    pool_ref: PoolReference
    rules: list[Rule]


class RewriteObject(_Struct, frozen=True):
    """An InferenceModelRewrite."""

    metadata: Metadata
    spec: RewriteSpec


class _ListMetadata(_Struct, frozen=True):
    resource_version: str = ""
    continue_: str | None = msgspec.field(default=None, name="continue")


class ObjectList(_Struct, frozen=True):
    """One page of a list; its items not read yet."""

    items: list[Raw] | None = None
    metadata: _ListMetadata = _ListMetadata()


class WatchEvent(_Struct, frozen=True):
    """One line of a watch; its object not read yet."""

    type: str
    object: Raw = Raw(b"{}")


class Status(_Struct, frozen=True):
    """What the API server answers in place of an object."""

    code: int = 0
    reason: str | None = None
    message: str | None = None


class Bookmark(_Struct, frozen=True):
    """An object of which only the version is told."""

    metadata: _ListMetadata = _ListMetadata()


def read(data: bytes | Raw, kind: type[_T]) -> _T:
    """Reads JSON.

    Raises:
        BadObjectError: It is none of this kind.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadObjectError(str(error)) from error
