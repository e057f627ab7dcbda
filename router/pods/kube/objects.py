"""Kubernetes objects, as far as the router reads them: JSON bytes in, typed values out.

All data of the API server is validated here, and nowhere else.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Raw

_T = TypeVar("_T")

_Name = Annotated[str, Meta(min_length=1, max_length=253)]
_Port = Annotated[int, Meta(ge=1, le=65_535)]
_Int32 = Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)]


class BadObjectError(ValueError):
    """Invalid object; the message names the field."""


class _Struct(msgspec.Struct, frozen=True, rename="camel"):
    """Base of all objects; unknown fields are ignored."""


class Metadata(_Struct, frozen=True):
    """Metadata of an object; null counts as missing."""

    name: _Name
    uid: str = ""
    namespace: str = ""
    resource_version: str = ""
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class Head(_Struct, frozen=True):
    """Object of any kind, of which only the metadata is read."""

    metadata: Metadata


class Counted(_Struct, frozen=True):
    """Kubernetes Event, of which only the number of occurrences is read."""

    count: int | None = None


class _Condition(_Struct, frozen=True):
    type: str
    status: str


class _ContainerStatus(_Struct, frozen=True):
    name: str
    restart_count: int = 0
    container_id: str | None = msgspec.field(default=None, name="containerID")


class _ProbedPort(_Struct, frozen=True):
    # Port number, or name of a container port.
    port: int | str


class _Probe(_Struct, frozen=True):
    http_get: _ProbedPort | None = None
    tcp_socket: _ProbedPort | None = None
    grpc: _ProbedPort | None = None


class _ContainerPort(_Struct, frozen=True):
    container_port: int
    name: str | None = None


class _Container(_Struct, frozen=True):
    ports: list[_ContainerPort] | None = None
    readiness_probe: _Probe | None = None


class _PodSpec(_Struct, frozen=True):
    containers: list[_Container] | None = None


class _PodStatus(_Struct, frozen=True):
    phase: str | None = None
    pod_ip: str | None = msgspec.field(default=None, name="podIP")
    conditions: list[_Condition] | None = None
    container_statuses: list[_ContainerStatus] | None = None


class PodObject(_Struct, frozen=True):
    """Pod."""

    metadata: Metadata
    spec: _PodSpec | None = None
    status: _PodStatus | None = None


class _MatchLabels(_Struct, frozen=True):
    match_labels: dict[str, str]


class _TargetPort(_Struct, frozen=True):
    number: _Port


class _PoolSpec(_Struct, frozen=True):
    selector: _MatchLabels
    target_ports: Annotated[list[_TargetPort], Meta(min_length=1, max_length=8)]


class PoolObject(_Struct, frozen=True):
    """InferencePool of the group inference.networking.k8s.io."""

    metadata: Metadata
    spec: _PoolSpec


class _OldPoolSpec(_Struct, frozen=True):
    selector: dict[str, str]
    target_port_number: _Port


class OldPoolObject(_Struct, frozen=True):
    """InferencePool of the group inference.networking.x-k8s.io."""

    metadata: Metadata
    spec: _OldPoolSpec


class PoolReference(_Struct, frozen=True):
    """Reference of an objective or rewrite to its pool."""

    name: _Name
    group: str | None = None
    kind: str | None = None


class _ObjectiveSpec(_Struct, frozen=True):
    pool_ref: PoolReference
    priority: _Int32 | None = None


class ObjectiveObject(_Struct, frozen=True):
    """InferenceObjective."""

    metadata: Metadata
    spec: _ObjectiveSpec


class _ModelMatch(_Struct, frozen=True):
    value: Annotated[str, Meta(min_length=1)]
    type: str | None = None


class _Match(_Struct, frozen=True):
    model: _ModelMatch


class _Target(_Struct, frozen=True):
    model_rewrite: str
    weight: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None


class _Rule(_Struct, frozen=True):
    targets: Annotated[list[_Target], Meta(min_length=1, max_length=1000)]
    matches: list[_Match] | None = None


class _RewriteSpec(_Struct, frozen=True):
    pool_ref: PoolReference
    rules: list[_Rule]


class RewriteObject(_Struct, frozen=True):
    """InferenceModelRewrite."""

    metadata: Metadata
    spec: _RewriteSpec


class _ListMetadata(_Struct, frozen=True):
    resource_version: str = ""
    continue_: str | None = msgspec.field(default=None, name="continue")


class ObjectList(_Struct, frozen=True):
    """Page of a list, with its items unparsed."""

    items: list[Raw] | None = None
    metadata: _ListMetadata = _ListMetadata()


class WatchEvent(_Struct, frozen=True):
    """Event of a watch, with its object unparsed."""

    type: str
    object: Raw = Raw(b"{}")


class Status(_Struct, frozen=True):
    """Status object that the API server returns for an error."""

    code: int = 0
    reason: str | None = None
    message: str | None = None


_KINDS: tuple[type[_Struct], ...] = (
    *(Head, Counted, ObjectList, WatchEvent, Status),
    *(PodObject, PoolObject, OldPoolObject, ObjectiveObject, RewriteObject),
)
_DECODERS: dict[type[Any], msgspec.json.Decoder[Any]] = {kind: msgspec.json.Decoder(kind) for kind in _KINDS}


def read(data: bytes | Raw, kind: type[_T]) -> _T:
    """Parse JSON as an object of this kind.

    Raises:
        BadObjectError: The data is not JSON, or not of this kind.
    """
    try:
        found: _T = _DECODERS[kind].decode(data)
        return found
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadObjectError(str(error)) from error
