"""The public surface of the code as lines of text: what operators and clients may depend on.

Each function of `SECTIONS` collects one section. It inspects behaviour (parsers, registries, descriptors) or
string constants, so that moving code between modules changes nothing here.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import re
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import yaml
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorSet
from grpc_tools import protoc
from msgspec import inspect
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from kvroute.cli import main as kvroute
from model_server.kv_events.replay import PublisherStats
from model_server.openai.metrics import EngineCollector, LoraCollector, RequestMetrics, new_registry
from model_server.requests import EngineStats
from router.app.config import parse_flags
from router.app.server import RouterServer
from router.config.fields import Settings
from router.errors import ConfigError
from tests.support.paths import ROOT

_CHART = ROOT / "charts" / "kvroute"
_BUILD = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
_PACKAGES = tuple(_BUILD["targets"]["wheel"]["packages"])

_PATH = re.compile(r"/[a-z0-9_]+(/[a-zA-Z0-9_{}.-]+)*/?")
_FILES = ("/proc/", "/var/", "/sys/", "/dev/", "/etc/", "/tmp/")
_HEADER = re.compile(r":?(x-[a-z0-9]+(-[a-z0-9]+)*|session[-_]id|traceparent|authorization)")
_LABEL = re.compile(r"(?:[a-z0-9-]+\.)+(?:io|ai)/[A-Za-z0-9./_-]+")
_SERVICE = re.compile(r"/?(?:envoy\.service|grpc|kvroute|vllm)(?:\.[a-z0-9_]+)+\.[A-Z]\w+(?:/[A-Z]\w+)?")
_VARIABLE = re.compile(r"(?:KVROUTE|OTEL|POD|VLLM|KUBERNETES)_[A-Z_]+")
_WORD = re.compile(r"[a-z][A-Za-z]*")
_FLOW_CONFIG = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
featureGates: [flowControl]
"""
_KUBECONFIG = """\
{apiVersion: v1, kind: Config, current-context: a, contexts: [{name: a, context: {cluster: a, user: a}}],
 clusters: [{name: a, cluster: {server: "http://127.0.0.1:1"}}], users: [{name: a, user: {token: t}}]}
"""


def flags() -> Iterator[str]:
    """Return every flag of every command, and the benchmarks' names."""
    for command in _listed(_output(["--help"])):
        yield f"kvroute {command}"
        if command == "bench":
            names = _listed(_output(["bench"]))
            yield from (f"kvroute bench {name}" for name in names)
            continue
        parser = _parser(lambda command=command: kvroute([command]))
        yield from (f"kvroute {command} {flag}" for flag in _options(parser))
    for _, tree in _trees(("benchmarks",)):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
                yield from (f"benchmark {arg.value}" for arg in node.args if isinstance(arg, ast.Constant))


def chart_values() -> Iterator[str]:
    """Return the path of every chart value, from the schema and the defaults."""
    schema = json.loads((_CHART / "values.schema.json").read_text())
    yield from _schema_paths(schema, schema, "")
    yield from _value_paths(yaml.safe_load((_CHART / "values.yaml").read_text()), "")


def metrics() -> Iterator[str]:
    """Return name, labels and type of every metric, by program."""
    for argv in _router_variants():
        for registry in _registries(argv):
            yield from (f"router {line}" for line in _families(registry))
    yield from (f"model-server {line}" for line in _families(_model_server_registry()))


def http_paths() -> Iterator[str]:
    """Return the HTTP paths that are served, requested or routed, by package."""
    for package, text in _strings():
        if _PATH.fullmatch(text) and not text.startswith(_FILES) and not text.endswith((".py", ".so")):
            yield f"{package} {text}"


def grpc_methods() -> Iterator[str]:
    """Return the methods of our gRPC services, and the names of others' services."""
    for file in _descriptors().file:
        for service in file.service:
            yield from (f"/{file.package}.{service.name}/{method.name}" for method in service.method)
    for _, text in _strings():
        if _SERVICE.fullmatch(text):
            yield text
            # A method's path contains its service's name too.
            yield text.removeprefix("/").partition("/")[0]


def proto_fields() -> Iterator[str]:
    """Return number, name and type of every field of our messages, and the values of our enums."""
    for file in _descriptors().file:
        for enum in file.enum_type:
            yield from (f"{file.package}.{enum.name} {value.number} {value.name}" for value in enum.value)
        for message in file.message_type:
            yield from _message_fields(f"{file.package}.{message.name}", message)


def headers() -> Iterator[str]:
    """Return the names of headers that are read or set."""
    for _, text in _strings():
        if _HEADER.fullmatch(text):
            yield text


def pod_labels() -> Iterator[str]:
    """Return labels, annotations and API groups."""
    for _, text in _strings():
        if _LABEL.fullmatch(text):
            yield text


def variables() -> Iterator[str]:
    """Return the environment variables that are read."""
    for _, text in _strings():
        if _VARIABLE.fullmatch(text):
            yield text


def configuration_words() -> Iterator[str]:
    """Return the keys of the picker's configuration file and the pods file, and the types of plugins."""
    _refusal("plugins: [{type: unknown}]")  # Imports all modules that read the file.
    for kind in _heirs(Settings):
        for word in (*_keys(kind), *kind.instead):
            yield f"picker file: {word}"
    yield from (f"picker file: {gate}" for gate in _refusal("featureGates: [unknown]"))
    for _, tree in _trees(_PACKAGES):
        if "parse_pods" in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}:
            yield from (f"pods file: {word}" for word in _set_members(tree))
    yield from (f"plugin: {kind}" for kind in _refusal("plugins: [{type: unknown}]"))


SECTIONS: Mapping[str, Callable[[], Iterable[str]]] = {
    "flag": flags,
    "chart value": chart_values,
    "metric": metrics,
    "HTTP path": http_paths,
    "gRPC method": grpc_methods,
    "proto field": proto_fields,
    "header": headers,
    "pod label": pod_labels,
    "variable": variables,
    "configuration": configuration_words,
}
"""By the name of a section: what collects its lines."""


class _CaughtError(Exception):
    """Exception that carries a parser out of a command before it parses its flags."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def _parser(run: Callable[[], object]) -> argparse.ArgumentParser:
    """Return the parser of a command's flags."""

    def caught(self: argparse.ArgumentParser, *_: object, **__: object) -> NoReturn:
        raise _CaughtError(self)

    with mock.patch.object(argparse.ArgumentParser, "parse_known_args", caught):
        try:
            run()
        except _CaughtError as found:
            return found.parser
    raise AssertionError("the command reads no flags with argparse")


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    # argparse has no public list of its actions.
    for action in parser._actions:
        yield from (option for option in action.option_strings if option not in ("-h", "--help"))


def _output(argv: list[str]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        kvroute(argv)
    return shown.getvalue()


def _listed(page: str) -> list[str]:
    """Return the names listed on a help page."""
    return re.findall(r"^  ([a-z][a-z_-]*)   +\S", page, re.MULTILINE)


def _schema_paths(schema: Any, root: Any, path: str) -> Iterator[str]:
    while isinstance(schema, dict) and (reference := schema.get("$ref", "")).startswith("#/"):
        found = root
        for step in reference[2:].split("/"):
            found = found[step]
        schema = found
    if not isinstance(schema, dict):
        return
    for name, inner in schema.get("properties", {}).items():
        here = f"{path}.{name}" if path else name
        yield here
        yield from _schema_paths(inner, root, here)
    for key in ("items", "additionalProperties"):
        yield from _schema_paths(schema.get(key), root, f"{path}[]")
    for key in ("oneOf", "anyOf", "allOf"):
        for inner in schema.get(key, ()):
            yield from _schema_paths(inner, root, path)


def _value_paths(values: Any, path: str) -> Iterator[str]:
    if isinstance(values, dict):
        for name, inner in values.items():
            here = f"{path}.{name}" if path else str(name)
            yield here
            yield from _value_paths(inner, here)


def _router_variants() -> Iterator[list[str]]:
    """Return command lines that together enable everything with metrics."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "pods.yaml").write_text("endpoints: []\n")
        (folder / "picker.yaml").write_text(_FLOW_CONFIG)
        (folder / "kube").write_text(_KUBECONFIG)
        ports = ["--grpc-port=0", "--metrics-port=0"]
        pods = [f"--pods-file={folder / 'pods.yaml'}", *ports]
        yield [*pods, f"--config-file={folder / 'picker.yaml'}", "--enable-grpc-stream-metrics"]
        yield [*pods, "--backend=redis", "--redis-url=redis://127.0.0.1:1", "--hash-seed=1"]
        yield ["--pool-name=p", "--pool-namespace=n", f"--kubeconfig={folder / 'kube'}", *ports]


def _registries(argv: list[str]) -> list[CollectorRegistry]:
    """Return the registries of a router that is built and never started."""
    made: list[CollectorRegistry] = []
    plain = CollectorRegistry.__init__

    def noted(self: CollectorRegistry, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        made.append(self)

    with mock.patch.object(CollectorRegistry, "__init__", noted):
        RouterServer(parse_flags(argv)[0]).close()
    return made


def _model_server_registry() -> CollectorRegistry:
    registry = new_registry()
    RequestMetrics("m", registry)
    stats = EngineStats(*(0,) * len(EngineStats.__dataclass_fields__))
    registry.register(EngineCollector("m", lambda: stats, PublisherStats(), {"block_size": "16"}))
    registry.register(LoraCollector(1, lambda: ([], []), lambda: 0.0))
    return registry


def _families(registry: CollectorRegistry) -> Iterator[str]:
    # prometheus_client publishes labels only of existing series; the names are in private fields.
    for collector in list(registry._collector_to_names):
        if isinstance(collector, MetricWrapperBase):
            labels = collector._labelnames
            yield from (
                f"{family.name}{{{', '.join(labels)}}} {family.type}" for family in collector.describe()
            )
            continue
        for family in collector.collect():
            labels = getattr(family, "_labelnames", None) or _sampled_labels(family)
            yield f"{family.name}{{{', '.join(labels)}}} {family.type}"


def _sampled_labels(family: Any) -> list[str]:
    found = {name for sample in family.samples for name in sample.labels} - {"le"}
    return sorted(found)


@cache
def _descriptors() -> FileDescriptorSet:
    source = ROOT / "proto" / "kvroute" / "v1"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "set"
        files = [str(path) for path in sorted(source.glob("*.proto"))]
        assert protoc.main(["protoc", f"-I{source}", f"--descriptor_set_out={out}", *files]) == 0
        return FileDescriptorSet.FromString(out.read_bytes())


def _message_fields(name: str, message: DescriptorProto) -> Iterator[str]:
    for each in message.field:
        kind = (
            each.type_name.lstrip(".")
            or FieldDescriptorProto.Type.Name(each.type).removeprefix("TYPE_").lower()
        )
        many = "repeated " if each.label == FieldDescriptorProto.LABEL_REPEATED else ""
        yield f"{name} {each.number} {each.name} {many}{kind}"
    for inner in message.nested_type:
        yield from _message_fields(f"{name}.{inner.name}", inner)
    for enum in message.enum_type:
        yield from (f"{name}.{enum.name} {value.number} {value.name}" for value in enum.value)


@cache
def _trees(folders: tuple[str, ...]) -> list[tuple[str, ast.Module]]:
    """Return the syntax tree of every module under some folders, with the folder's name."""
    return [
        (folder, ast.parse(path.read_text()))
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "_pb" not in path.parts
    ]


@cache
def _strings() -> set[tuple[str, str]]:
    """Return the product's string constants with their packages; f-string fields become `{}`."""
    found = set()
    for package, tree in _trees(_PACKAGES):
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                found.add((package, node.value))
            elif isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
                found.add((package, "".join(map(str, parts))))
    return found


def _heirs(kind: type[Settings]) -> Iterator[type[Settings]]:
    for heir in kind.__subclasses__():
        yield heir
        yield from _heirs(heir)


def _keys(kind: type[Settings]) -> Iterator[str]:
    """Return the keys of a section of the configuration, and the allowed values of enumerations."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    for field in info.fields:
        yield field.encode_name
        for one in field.type.types if isinstance(field.type, inspect.UnionType) else (field.type,):
            if isinstance(one, inspect.LiteralType):
                yield from (str(value) for value in one.values)


def _plain_words(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _WORD.fullmatch(node.value):
            yield node.value


def _set_members(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Set):
            yield from _plain_words(node.elts)


def _refusal(section: str) -> list[str]:
    """Return the allowed words from the error for an unknown word in a section of the configuration."""
    head = _FLOW_CONFIG.replace("featureGates: [flowControl]\n", "")
    try:
        RouterServer(parse_flags(["--pods-file=/none", "--config-text", f"{head}{section}\n"])[0])
    except ConfigError as error:
        return re.split(r"; (?:expected one of|known): ", str(error))[1].split(", ")
    raise AssertionError(f"an unknown word was accepted: {section}")
