"""Declared pods: addresses, labels, and the streams of their KV cache events.

Pods are declared by Kubernetes or by a YAML file in the format of llm-d's file discovery:

endpoints:
  - name: a
    namespace: default      # optional
    address: 127.0.0.1
    port: "8001"
    labels: {kvroute.io/model: kvroute-tiny, kvroute.io/kv-events-port: "5557"}

Labels of `kvroute.io/` from either source are validated here. No I/O.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

import yaml

from indexer.config import DEFAULT_EVENTS_PORT, PODS_MAX, RANKS_MAX, PodStream
from indexer.errors import ConfigError

MODEL_LABEL = "kvroute.io/model"
EVENTS_PORT_LABEL = "kvroute.io/kv-events-port"
REPLAY_PORT_LABEL = "kvroute.io/kv-replay-port"
# "connects": the pod's publisher connects to our socket; "listens": we connect to its port.
EVENTS_LABEL = "kvroute.io/kv-events"
# Prefix of the topics of its messages, for publishers that share an address.
TOPIC_LABEL = "kvroute.io/kv-events-topic"
# Number of data-parallel engines behind the pod's serving port; their publishers use the ports above + rank.
RANKS_LABEL = "kvroute.io/kv-ranks"
# "true": the pod answers GET /kv_events/snapshot.
SNAPSHOT_LABEL = "kvroute.io/kv-snapshot"
# Port of vLLM's snapshot socket, in the form of its unmerged pull request 57789.
SNAPSHOT_PORT_LABEL = "kvroute.io/kv-snapshot-port"
# Sequence number of a stream's first batch; 1 for llm-d's simulator.
FIRST_SEQUENCE_LABEL = "kvroute.io/kv-first-sequence"
# Port of administration and snapshots, if it differs from the serving port.
ADMIN_PORT_LABEL = "kvroute.io/admin-port"
# Port and path of its metrics page, if it is not /metrics at the serving port.
METRICS_PORT_LABEL = "kvroute.io/metrics-port"
METRICS_PATH_LABEL = "kvroute.io/metrics-path"

EVENT_LABELS = (
    EVENTS_PORT_LABEL,
    REPLAY_PORT_LABEL,
    EVENTS_LABEL,
    TOPIC_LABEL,
    RANKS_LABEL,
    SNAPSHOT_LABEL,
    SNAPSHOT_PORT_LABEL,
    FIRST_SEQUENCE_LABEL,
)
"""Labels of a pod's event stream."""

PORT_LABELS = (
    EVENTS_PORT_LABEL,
    REPLAY_PORT_LABEL,
    SNAPSHOT_PORT_LABEL,
    METRICS_PORT_LABEL,
    ADMIN_PORT_LABEL,
)
"""Labels whose values are ports."""

_CHOICES = {
    EVENTS_LABEL: ("listens", "connects"),
    SNAPSHOT_LABEL: ("true", "false"),
    FIRST_SEQUENCE_LABEL: ("0", "1"),
}
_MAX_BYTES = 1 << 20
_FIELDS = frozenset({"name", "namespace", "address", "port", "labels"})
_TOPIC_CHARS_MAX = 256
_PATH = re.compile(r"/[!-~]{0,255}")


@dataclass(frozen=True, slots=True)
class EventDefaults:
    """Properties of a pod's event stream for which it has no labels."""

    port: int = DEFAULT_EVENTS_PORT
    replay_port: int | None = None  # None: no replays
    snapshots: bool = False  # whether the pod may answer GET /kv_events/snapshot
    asks_engine: bool = False  # whether the engine's answer to GET /kv_event_sources overrides these
    rank: int | None = None  # data-parallel rank behind the port; None: all ranks of the pod


@dataclass(frozen=True, slots=True)
class PodEntry:
    """Declared endpoint."""

    name: str
    namespace: str  # "default" if the file names none
    address: str
    port: int
    labels: Mapping[str, str] = field(default_factory=dict)
    epoch: str = ""  # changes with anything that empties the cache: another pod or process at this address
    ready: bool = True  # whether the source declares the pod ready for requests
    events: EventDefaults = EventDefaults()  # properties of the event stream without a label

    @property
    def pod(self) -> str:
        return pod_address(self.address, self.port)

    @property
    def admin(self) -> str | None:
        """Address "ip:port" of the pod's administration; None: it has no separate port."""
        # Labels are validated when they are read.
        port = self.labels.get(ADMIN_PORT_LABEL)
        return None if port is None else pod_address(self.address, int(port))

    def stream(self) -> PodStream | None:
        model = self.labels.get(MODEL_LABEL)
        if not model:
            return None
        # Labels are validated when they are read.
        connects = self.labels.get(EVENTS_LABEL) == "connects"
        port = int(self.labels.get(EVENTS_PORT_LABEL, self.events.port))
        replay = self.labels.get(REPLAY_PORT_LABEL, self.events.replay_port)
        ranks = int(self.labels.get(RANKS_LABEL, 1))
        snapshots = self.labels.get(SNAPSHOT_LABEL)
        # With several engines behind one port a snapshot would be of an unknown one.
        offers_snapshots = snapshots == "true" or (snapshots is None and self.events.snapshots and ranks == 1)
        host = _host(self.address)
        url = f"http://{self.admin or self.pod}/kv_events/snapshot" if offers_snapshots else None
        if (snapshot_port := self.labels.get(SNAPSHOT_PORT_LABEL)) is not None:
            url = f"tcp://{host}:{int(snapshot_port)}"
        return PodStream(
            pod=self.pod,
            model=model,
            events_endpoint=None if connects else f"tcp://{host}:{port}",
            replay_endpoint=None if replay is None else f"tcp://{host}:{int(replay)}",
            snapshot_url=url,
            snapshot_admin=self.admin is not None,
            first_sequence=int(self.labels.get(FIRST_SEQUENCE_LABEL, 0)),
            ranks=ranks,
            epoch=self.epoch,
            topic_prefix=self.labels.get(TOPIC_LABEL),
        )


def pod_address(ip: str, port: int) -> str:
    """Return "ip:port", with brackets around an IPv6 address; it identifies a pod."""
    return f"{_host(ip)}:{port}"


def label_problem(name: str, value: str) -> str | None:
    """Return what is wrong with a label's value; None if it is valid or the label is not ours."""
    if name in PORT_LABELS and not is_port(value):
        return f"must be a port of 1..65535, is {value!r}"
    if name in _CHOICES and value not in _CHOICES[name]:
        return f"must be {' or '.join(_CHOICES[name])}, is {value!r}"
    if name == RANKS_LABEL and not _is_number(value, 1, RANKS_MAX):
        return f"must be 1..{RANKS_MAX}, is {value!r}"
    if name == TOPIC_LABEL and not (value.isprintable() and len(value) <= _TOPIC_CHARS_MAX):
        return f"must be at most {_TOPIC_CHARS_MAX} printable characters"
    if name == METRICS_PATH_LABEL and not is_path(value):
        return f"must be a path such as /metrics, is {value[:100]!r}"
    return None


def is_port(text: str) -> bool:
    """Return whether a text is a port number, 1..65535."""
    return _is_number(text, 1, 65_535)


def is_path(text: str) -> bool:
    """Return whether a text is a URL path of at most 256 printable ASCII characters."""
    return _PATH.fullmatch(text) is not None


def _is_number(text: str, least: int, most: int) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 6 and least <= int(text) <= most


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def parse_pods(text: str, source: str) -> tuple[PodEntry, ...]:
    """Parse the text of a pods file, a list `endpoints` that may be empty; errors name the file `source`.

    Raises:
        ConfigError: The file is invalid; the message names file, line and field.
    """
    if len(text.encode("utf-8", "replace")) > _MAX_BYTES:
        raise ConfigError(f"{source}: is larger than {_MAX_BYTES} bytes")
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{source}: is not valid YAML: {error}") from None
    if root is None:
        raise ConfigError(f"{source}: is empty; it must have a list 'endpoints'")
    reader = _Reader(source)
    if not isinstance(root, yaml.MappingNode):
        reader.fail(root, "", "must be a mapping with the list 'endpoints'")
    top = reader.mapping(root, "", {"endpoints"})
    if not isinstance(top.get("endpoints"), yaml.SequenceNode):
        reader.fail(root, "endpoints", "must be a list")
    entries: dict[str, PodEntry] = {}
    for position, node in enumerate(top["endpoints"].value):
        if position == PODS_MAX:
            reader.fail(node, f"endpoints[{position}]", f"exceeds the limit of {PODS_MAX} endpoints")
        entry = reader.endpoint(node, f"endpoints[{position}]")
        if entry.pod in entries:
            reader.fail(
                node, f"endpoints[{position}]", f"address and port {entry.pod} duplicate another endpoint's"
            )
        entries[entry.pod] = entry
    return tuple(entries.values())


class _Reader:
    def __init__(self, source: str) -> None:
        self._source = source

    def fail(self, node: yaml.Node, path: str, problem: str) -> NoReturn:
        raise ConfigError(f"{self._source}:{node.start_mark.line + 1}: {path or 'the file'}: {problem}")

    def endpoint(self, node: yaml.Node, path: str) -> PodEntry:
        fields = self.mapping(node, path, _FIELDS)
        for required in ("name", "address", "port"):
            if required not in fields:
                self.fail(node, f"{path}.{required}", "is missing")
        labels = self.labels(fields.pop("labels"), f"{path}.labels") if "labels" in fields else {}
        texts = {"namespace": "default"}
        texts |= {name: self.text(value, f"{path}.{name}") for name, value in fields.items()}
        try:
            ipaddress.ip_address(texts["address"])
        except ValueError:
            self.fail(fields["address"], f"{path}.address", f"must be an IP address, is {texts['address']!r}")
        if not is_port(texts["port"]):
            self.fail(fields["port"], f"{path}.port", f"must be a port of 1..65535, is {texts['port']!r}")
        entry = PodEntry(texts["name"], texts["namespace"], texts["address"], int(texts["port"]), labels)
        try:
            stream = entry.stream()
            if stream is not None:
                stream.by_rank()
        except ConfigError as error:
            self.fail(node, f"{path}.labels", str(error))
        return entry

    def labels(self, node: yaml.Node, path: str) -> dict[str, str]:
        labels = {
            name: self.text(value, f"{path}[{name}]") for name, value in self.mapping(node, path).items()
        }
        for name, value in labels.items():
            if (problem := label_problem(name, value)) is not None:
                self.fail(node, f"{path}[{name}]", problem)
        return labels

    def mapping(
        self, node: yaml.Node, path: str, allowed: Collection[str] | None = None
    ) -> dict[str, yaml.Node]:
        if not isinstance(node, yaml.MappingNode):
            self.fail(node, path, "must be a mapping")
        fields: dict[str, yaml.Node] = {}
        for key, value in node.value:
            name = self.text(key, path)
            if name in fields:
                self.fail(key, f"{path}.{name}", "is given twice")
            if allowed is not None and name not in allowed:
                self.fail(key, f"{path}.{name}", f"is unknown; known are {', '.join(sorted(allowed))}")
            fields[name] = value
        return fields

    def text(self, node: yaml.Node, path: str) -> str:
        if not isinstance(node, yaml.ScalarNode) or not node.value:
            self.fail(node, path, "must be a text")
        return str(node.value)
