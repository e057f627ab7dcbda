"""Filters and a scorer by what pods declare: selectors, roles in disaggregation, addresses of a test."""

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
    """One of a selector's matchExpressions, as in Kubernetes."""

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
    """A Kubernetes label selector."""

    match_labels: Mapping[str, Text] = {}
    match_expressions: tuple[Expression, ...] = ()

    def filter(self, _request: PluginRequest, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        return [endpoint for endpoint in endpoints if self._matches(endpoint.labels)]

    def _matches(self, labels: Mapping[str, str]) -> bool:
        return self.match_labels.items() <= labels.items() and all(
            expression.matches(labels) for expression in self.match_expressions
        )


class ByLabelFilter(Settings):
    """The reference's older form: one label out of some values."""

    label: Text
    valid_values: tuple[Text, ...] = ()
    allows_no_label: bool = False

    def __post_init__(self) -> None:
        if not self.valid_values and not self.allows_no_label:
            raise ValueError("validValues: no endpoint could ever pass; name at least one value")

    def filter(self, _request: PluginRequest, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        """Those whose label is one of the values, or missing where that is allowed."""
        return [endpoint for endpoint in endpoints if self._may_stay(endpoint.labels.get(self.label))]

    def _may_stay(self, value: str | None) -> bool:
        return self.allows_no_label if value is None else value in self.valid_values


class DecodeFilter(Settings):
    """Pods whose role in disaggregated serving is this one; one without a role decodes."""

    role: ClassVar[str] = "decode"

    def filter(self, _request: PluginRequest, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        allowed, other = _ROLES[self.role], "decode"
        return [endpoint for endpoint in endpoints if endpoint.labels.get(ROLE_LABEL, other) in allowed]


class PrefillFilter(DecodeFilter):
    """The same of prefilling."""

    role: ClassVar[str] = "prefill"


class EncodeFilter(DecodeFilter):
    """The same of encoding."""

    role: ClassVar[str] = "encode"


class HeaderLabelScorer(Settings):
    """1 for endpoints whose label says what the request's header says, 0 for the others."""

    header_name: Text
    label_key: Text

    def score(self, request: PluginRequest, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        """One score for each endpoint; 0 for all where the request has no such header."""
        asked = request.headers.get(self.header_name.lower())
        return [float(bool(asked) and endpoint.labels.get(self.label_key) == asked) for endpoint in endpoints]


class HeaderTestingFilter(Settings):
    """The conformance tests' filter: the endpoints named in a header, in that order; without it, none."""

    def filter(self, request: PluginRequest, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        """Those that the header names by "ip" or "ip:port"."""
        by_name: dict[str, Endpoint] = {}
        for endpoint in endpoints:
            by_name[endpoint.address] = endpoint
            by_name[endpoint.address.rpartition(":")[0].strip("[]")] = endpoint
        found: dict[str, Endpoint] = {}
        for item in request.headers.get(SELECTION_HEADER, "").split(","):
            endpoint_named = by_name.get(item.strip()) or by_name.get(item.strip().strip("[]"))
            if endpoint_named is not None:
                found.setdefault(endpoint_named.address, endpoint_named)
        return list(found.values())
