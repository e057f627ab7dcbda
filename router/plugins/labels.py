"""Plugins that use pod labels and request headers: selectors, roles, header affinity, test selection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from router.config.fields import Settings, Text
from router.plugins.api import Endpoint, PluginRequest
from router.pods.pod_set import ROLE_LABEL

SELECTION_HEADER = "test-epp-endpoint-selection"

_ROLES = {
    "decode": ("decode", "encode-decode", "prefill-decode", "encode-prefill-decode", "both"),
    "prefill": ("prefill", "encode-prefill", "prefill-decode", "encode-prefill-decode", "both"),
    "encode": ("encode", "encode-prefill", "encode-decode", "encode-prefill-decode"),
}


class Expression(Settings):
    """Entry of matchExpressions in a Kubernetes label selector."""

    key: Text
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: tuple[Text, ...] = ()

    def __post_init__(self) -> None:
        if (self.operator in ("In", "NotIn")) != bool(self.values):
            needs = "takes no" if self.values else "needs"
            raise ValueError(f"values: {self.operator} {needs} values")

    def matches(self, labels: Mapping[str, str]) -> bool:
        if self.values:
            return (labels.get(self.key) in self.values) == (self.operator == "In")
        return (self.key in labels) == (self.operator == "Exists")


class LabelSelectorFilter(Settings):
    """Filter that keeps the endpoints that a Kubernetes label selector matches."""

    match_labels: Mapping[str, Text] = {}
    match_expressions: tuple[Expression, ...] = ()

    def filter(self, _request: PluginRequest, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        return [endpoint for endpoint in endpoints if self._matches(endpoint.labels)]

    def _matches(self, labels: Mapping[str, str]) -> bool:
        return self.match_labels.items() <= labels.items() and all(
            expression.matches(labels) for expression in self.match_expressions
        )


class ByLabelFilter(Settings):
    """llm-d's older form of a label filter: one label with a list of valid values."""

    label: Text
    valid_values: tuple[Text, ...] = ()
    allows_no_label: bool = False

    def __post_init__(self) -> None:
        if not self.valid_values and not self.allows_no_label:
            raise ValueError("validValues: expected at least one value, or allowsNoLabel: true")

    def filter(self, _request: PluginRequest, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        return [endpoint for endpoint in endpoints if self._passes(endpoint.labels.get(self.label))]

    def _passes(self, value: str | None) -> bool:
        return self.allows_no_label if value is None else value in self.valid_values


class DecodeFilter(Settings):
    """Filter that keeps pods whose role includes decode; pods without a role count as decode."""

    role: ClassVar[str] = "decode"

    def filter(self, _request: PluginRequest, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        allowed, default = _ROLES[self.role], "decode"
        return [endpoint for endpoint in endpoints if endpoint.labels.get(ROLE_LABEL, default) in allowed]


class PrefillFilter(DecodeFilter):
    """Filter that keeps pods whose role includes prefill."""

    role: ClassVar[str] = "prefill"


class EncodeFilter(DecodeFilter):
    """Filter that keeps pods whose role includes encode."""

    role: ClassVar[str] = "encode"


class HeaderLabelScorer(Settings):
    """Scores 1 for endpoints whose label equals a request header, else 0; 0 for all without the header."""

    header_name: Text
    label_key: Text

    def score(self, request: PluginRequest, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        value = request.headers.get(self.header_name.lower())
        return [float(bool(value) and endpoint.labels.get(self.label_key) == value) for endpoint in endpoints]


class HeaderTestingFilter(Settings):
    """Filter that keeps the endpoints ("ip" or "ip:port") in the conformance tests' header, in its order."""

    def filter(self, request: PluginRequest, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        by_name: dict[str, Endpoint] = {}
        for endpoint in endpoints:
            by_name[endpoint.address] = endpoint
            by_name[endpoint.address.rpartition(":")[0].strip("[]")] = endpoint
        found: dict[str, Endpoint] = {}
        for item in request.headers.get(SELECTION_HEADER, "").split(","):
            named = by_name.get(item.strip()) or by_name.get(item.strip().strip("[]"))
            if named is not None:
                found.setdefault(named.address, named)
        return list(found.values())
