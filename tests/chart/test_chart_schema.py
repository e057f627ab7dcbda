"""The values' schema: a typo is rejected with its path, and every value is checked."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.support.chart.helm import CHART, EVERYTHING, template

# Objects whose keys are defined by Kubernetes or the user.
_FREE = (
    "strings|config|tokenizers|affinity|[sS]ecurityContext|requests|limits|global|valueFrom|Selector|ipBlock"
)


@pytest.mark.parametrize(
    ("values", "path"),
    [
        ({"roter": {}}, "roter"),
        ({"router": {"replica": 2}}, "/router.*replica"),
        ({"router": {"replicas": "2"}}, "/router/replicas"),
        ({"router": {"drain": {"timeout": 3}}}, "/router/drain.*timeout"),
        ({"router": {"config": {"kind": "Config"}}}, "/router/config"),
        ({"router": {"objectives": [{"name": "x"}]}}, "/router/objectives/0.*priority"),
        ({"router": {"resources": {"request": {}}}}, "/router/resources.*request"),
        ({"router": {"kubeDeadline": "5 minutes"}}, "/router/kubeDeadline"),
        ({"envoy": {"door": "checks"}}, "/envoy/door.*check_grpc"),
        ({"envoy": {"door": "ext_proc", "failOpen": True}}, "/envoy/failOpen"),
        ({"envoy": {"responses": "full"}}, "/envoy/responses"),
        ({"gateway": {"inferencePool": {"failureMode": "failOpen"}}}, "/gateway/inferencePool/failureMode"),
        ({"gateway": {"httpRoute": {"parentRefs": [{"nam": "x"}]}}}, "/gateway/httpRoute/parentRefs/0"),
        ({"modelServers": {"engine": "sglang"}}, "/modelServers/engine"),
        ({"modelServers": {"targetPorts": list(range(1, 10))}}, "/modelServers/targetPorts"),
        ({"modelServers": {"targetPorts": [80, 80]}}, "/modelServers/targetPorts"),
        (
            {"modelServers": {"model": {"hub": {"cache": {"sze": "1Gi"}}}}},
            "/modelServers/model/hub/cache.*sze",
        ),
        ({"modelServers": {"sharedMemory": "8 GB"}}, "/modelServers/sharedMemory"),
        ({"indexer": {"redis": {"url": "http://x"}}}, "/indexer/redis/url"),
        ({"networkPolicy": {"clients": [{"namespace": "x"}]}}, "/networkPolicy/clients/0"),
        ({"mode": "sidecar"}, "/mode.*gateway"),
    ],
)
def test_an_invalid_value_is_rejected_with_its_path(values: dict[str, Any], path: str) -> None:
    """A misspelled key, wrong type or value out of range is rejected with its path."""
    error = template(values).error
    assert re.search(path, error), error


def test_every_object_is_closed() -> None:
    """Every object of the schema rejects unknown keys, except maps defined by others."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    open_ones = [
        path
        for path, node in _objects(schema, "")
        if node.get("additionalProperties", True) is True
        and not re.search(_FREE, path)
        and "items" not in path
    ]
    assert open_ones == []


def test_schema_and_values_list_the_same() -> None:
    """Every value is in the schema, and every schema entry has a default."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert set(_leaves_of_schema(schema, schema, "")) - {"/global"} == set(
        _leaves_of_values(values, schema, "")
    )


def test_every_option_is_accepted() -> None:
    """The schema accepts every option of the templates."""
    assert template(EVERYTHING).error == ""


def _resolved(node: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in node:
        node = schema["$defs"][node["$ref"].rpartition("/")[2]]
    return node


def _leaves_of_schema(node: dict[str, Any], schema: dict[str, Any], path: str) -> Iterator[str]:
    node = _resolved(node, schema)
    if not node.get("properties") or _is_kubernetes(path):
        yield path
        return
    for name, inner in node["properties"].items():
        yield from _leaves_of_schema(inner, schema, f"{path}/{name}")


def _leaves_of_values(value: Any, schema: dict[str, Any], path: str) -> Iterator[str]:
    node = schema
    for name in path.split("/")[1:]:
        node = _resolved(node["properties"][name], schema)
    if not isinstance(value, dict) or not node.get("properties") or _is_kubernetes(path):
        yield path
        return
    for name, inner in value.items():
        yield from _leaves_of_values(inner, schema, f"{path}/{name}")


def _is_kubernetes(path: str) -> bool:
    return path.endswith(("/resources", "/config"))


def _objects(node: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(node, list):
        for inner in node:
            yield from _objects(inner, path)
    if not isinstance(node, dict):
        return
    if node.get("type") == "object":
        yield path, node
    for name, inner in node.items():
        yield from _objects(inner, f"{path}/{name}")
