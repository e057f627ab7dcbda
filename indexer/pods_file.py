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
from collections.abc import Collection
from typing import NoReturn

import yaml

from indexer.config import PODS_MAX
from indexer.errors import ConfigError
from indexer.pod_entry import PodEntry, is_port, label_problem

_MAX_BYTES = 1 << 20
_FIELDS = frozenset({"name", "namespace", "address", "port", "labels"})


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
    if not isinstance(root, yaml.MappingNode):
        reader.fail(root, "", "must be a mapping with the list 'endpoints'")
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
                self.fail(key, f"{path}.{name}", "is there twice")
            if allowed is not None and name not in allowed:
                self.fail(key, f"{path}.{name}", f"is unknown; known are {', '.join(sorted(allowed))}")
            fields[name] = value
        return fields

    def text(self, node: yaml.Node, path: str) -> str:
        if not isinstance(node, yaml.ScalarNode) or not node.value:
            self.fail(node, path, "must be a text")
        return str(node.value)

    def port(self, node: yaml.Node, path: str) -> int:
        port = self.text(node, path)
        if not is_port(port):
            self.fail(node, path, f"must be a port of 1..65535, is {port!r}")
        return int(port)
