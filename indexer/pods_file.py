"""Pods from a static YAML file, in the format of llm-d's file discovery: text in, typed entries out, no I/O.

endpoints:
  - name: a
    namespace: default      # optional
    address: 127.0.0.1
    port: "8001"
    labels: {kvroute.io/model: kvroute-tiny, kvroute.io/kv-events-port: "5557"}
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

import yaml

from indexer.config import DEFAULT_EVENTS_PORT, PODS_MAX, RANKS_MAX, PodStream
from indexer.errors import ConfigError

MODEL_LABEL = "kvroute.io/model"
EVENTS_PORT_LABEL = "kvroute.io/kv-events-port"
REPLAY_PORT_LABEL = "kvroute.io/kv-replay-port"
# "connects": the pod's publisher connects to our socket; else we connect to its port.
EVENTS_LABEL = "kvroute.io/kv-events"
# Data-parallel engines behind the pod's one serving port, at the ports above + rank.
RANKS_LABEL = "kvroute.io/kv-ranks"
# "true": the pod answers GET /kv_events/snapshot at its serving port.
SNAPSHOT_LABEL = "kvroute.io/kv-snapshot"
# Number of a stream's first batch; 1 for llm-d's simulator.
FIRST_SEQUENCE_LABEL = "kvroute.io/kv-first-sequence"

_CHOICES = {
    EVENTS_LABEL: ("listens", "connects"),
    SNAPSHOT_LABEL: ("true", "false"),
    FIRST_SEQUENCE_LABEL: ("0", "1"),
}

_MAX_BYTES = 1 << 20
_FIELDS = frozenset({"name", "namespace", "address", "port", "labels"})


@dataclass(frozen=True, slots=True)
class PodEntry:
    """One endpoint of the file.

    Attributes:
        name: The pod's name, unique within its namespace.
        namespace: "default" where the file names none.
        address: An IP address.
        port: Its serving port.
        labels: As in Kubernetes.
    """

    name: str
    namespace: str
    address: str
    port: int
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def pod(self) -> str:
        """The pod's identity, "ip:port"."""
        return f"{_host(self.address)}:{self.port}"

    def stream(
        self, *, events_port: int = DEFAULT_EVENTS_PORT, replay_port: int | None = None
    ) -> PodStream | None:
        """Where the pod publishes its events; None for a pod without a model label.

        Args:
            events_port: Of pods without a label of their own.
            replay_port: Of pods without a label of their own; None: those have none.
        """
        model = self.labels.get(MODEL_LABEL)
        if not model:
            return None
        # The labels were checked when the file was read.
        connects = self.labels.get(EVENTS_LABEL) == "connects"
        events_port = int(self.labels.get(EVENTS_PORT_LABEL, events_port))
        replay = self.labels.get(REPLAY_PORT_LABEL, replay_port)
        offers_snapshots = self.labels.get(SNAPSHOT_LABEL) == "true"
        host = _host(self.address)
        return PodStream(
            pod=self.pod,
            model=model,
            events_endpoint=None if connects else f"tcp://{host}:{events_port}",
            replay_endpoint=None if replay is None else f"tcp://{host}:{int(replay)}",
            snapshot_url=f"http://{self.pod}/kv_events/snapshot" if offers_snapshots else None,
            first_sequence=int(self.labels.get(FIRST_SEQUENCE_LABEL, 0)),
            ranks=int(self.labels.get(RANKS_LABEL, 1)),
        )


def parse_pods(text: str, source: str) -> tuple[PodEntry, ...]:
    """Reads the text of a pods file.

    Args:
        text: YAML; a file without endpoints is none.
        source: The file's name, for errors.

    Raises:
        ConfigError: Something is wrong; the message names file, line and field.
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
    top = reader.mapping(root, "", {"endpoints"})
    if not isinstance(top.get("endpoints"), yaml.SequenceNode):
        reader.fail(root, "endpoints", "must be a list")
    entries: dict[str, PodEntry] = {}
    for position, node in enumerate(top["endpoints"].value):
        if position == PODS_MAX:
            reader.fail(
                node, f"endpoints[{position}]", f"is one more than the {PODS_MAX} that can be followed"
            )
        entry = reader.endpoint(node, f"endpoints[{position}]")
        if entry.pod in entries:
            reader.fail(
                node, f"endpoints[{position}]", f"address and port {entry.pod} are those of another one"
            )
        entries[entry.pod] = entry
    return tuple(entries.values())


class _Reader:
    """Reads YAML nodes, not values: they know their lines, and a port is the same text quoted or not."""

    def __init__(self, source: str) -> None:
        self._source = source

    def fail(self, node: yaml.Node, path: str, problem: str) -> NoReturn:
        raise ConfigError(f"{self._source}:{node.start_mark.line + 1}: {path or 'the file'}: {problem}")

    def endpoint(self, node: yaml.Node, path: str) -> PodEntry:
        fields = self.mapping(node, path, _FIELDS)
        for required in ("name", "address", "port"):
            if required not in fields:
                self.fail(node, f"{path}.{required}", "is missing")
        address = self.text(fields["address"], f"{path}.address")
        try:
            ipaddress.ip_address(address)
        except ValueError:
            self.fail(fields["address"], f"{path}.address", f"must be an IP address, is {address!r}")
        entry = PodEntry(
            name=self.text(fields["name"], f"{path}.name"),
            namespace=self.text(fields["namespace"], f"{path}.namespace")
            if "namespace" in fields
            else "default",
            address=address,
            port=self.port(fields["port"], f"{path}.port"),
            labels=self.labels(fields["labels"], f"{path}.labels") if "labels" in fields else {},
        )
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
        for name in (EVENTS_PORT_LABEL, REPLAY_PORT_LABEL):
            if name in labels:
                self.port(node, f"{path}[{name}]", labels[name])
        for name, choices in _CHOICES.items():
            if name in labels and labels[name] not in choices:
                self.fail(node, f"{path}[{name}]", f"must be {' or '.join(choices)}, is {labels[name]!r}")
        ranks = labels.get(RANKS_LABEL, "1")
        if not (ranks.isascii() and ranks.isdigit() and len(ranks) < 6 and 1 <= int(ranks) <= RANKS_MAX):
            self.fail(node, f"{path}[{RANKS_LABEL}]", f"must be 1..{RANKS_MAX}, is {ranks!r}")
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
                self.fail(key, f"{path}.{name}", "is there twice")
            if allowed is not None and name not in allowed:
                self.fail(key, f"{path}.{name}", f"is unknown; known are {', '.join(sorted(allowed))}")
            fields[name] = value
        return fields

    def text(self, node: yaml.Node, path: str) -> str:
        if not isinstance(node, yaml.ScalarNode) or not node.value:
            self.fail(node, path, "must be a text")
        return str(node.value)

    def port(self, node: yaml.Node, path: str, text: str | None = None) -> int:
        port = self.text(node, path) if text is None else text
        if not (port.isascii() and port.isdigit() and len(port) < 6 and 0 < int(port) < 65_536):
            self.fail(node, path, f"must be a port of 1..65535, is {port!r}")
        return int(port)


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address
