"""Filters and a scorer by what pods declare: selectors, roles in disaggregation, addresses of a test."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from router.config_fields import Fields
from router.plugins.api import Endpoint, PluginRequest

ROLE_LABEL = "llm-d.ai/role"
SELECTION_HEADER = "test-epp-endpoint-selection"

_ROLES = {
    "decode": ("decode", "encode-decode", "prefill-decode", "encode-prefill-decode", "both"),
    "prefill": ("prefill", "encode-prefill", "prefill-decode", "encode-prefill-decode", "both"),
    "encode": ("encode", "encode-prefill", "encode-decode", "encode-prefill-decode"),
}
_OPERATORS = ("In", "NotIn", "Exists", "DoesNotExist")

_Rule = Callable[[Mapping[str, str]], bool]


class LabelSelectorFilter:
    """A Kubernetes label selector."""

    def __init__(self, rules: Sequence[_Rule]) -> None:
        self._rules = tuple(rules)

    @classmethod
    def read(cls, parameters: Fields) -> LabelSelectorFilter:
        """From a configuration: matchLabels and matchExpressions, as in Kubernetes."""
        known = parameters.only("matchLabels", "matchExpressions")
        rules = [_in(key, (value,)) for key, value in known.pairs("matchLabels").items()]
        for expression in known.each("matchExpressions", ("key", "operator", "values")):
            key, values = expression.text("key"), expression.texts("values")
            operator = expression.choice("operator", _OPERATORS)
            if (operator in ("In", "NotIn")) != bool(values):
                expression.fail("values", f"{operator} {'needs' if not values else 'takes no'} values")
            rules.append(_expression(operator, key, values))
        return cls(rules)

    def filter(self, _request: PluginRequest, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        """Those whose labels match."""
        return [endpoint for endpoint in endpoints if all(rule(endpoint.labels) for rule in self._rules)]


class ByLabelFilter:
    """The reference's older form: one label out of some values."""

    def __init__(self, label: str, values: Sequence[str], *, allows_no_label: bool) -> None:
        self._label = label
        self._values = frozenset(values)
        self._allows_no_label = allows_no_label

    @classmethod
    def read(cls, parameters: Fields) -> ByLabelFilter:
        """From a configuration."""
        known = parameters.only("label", "validValues", "allowsNoLabel")
        values, allows_no_label = known.texts("validValues"), known.flag("allowsNoLabel", False)
        if not values and not allows_no_label:
            known.fail("validValues", "no endpoint could ever pass; name at least one value")
        return cls(known.text("label"), values, allows_no_label=allows_no_label)

    def filter(self, _request: PluginRequest, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        """Those whose label is one of the values, or missing where that is allowed."""
        return [endpoint for endpoint in endpoints if self._may_stay(endpoint.labels.get(self._label))]

    def _may_stay(self, value: str | None) -> bool:
        return self._allows_no_label if value is None else value in self._values


class RoleFilter:
    """Pods that declare a role of disaggregated serving."""

    def __init__(self, role: str) -> None:
        # A pod without a role decodes: a pool that is not disaggregated has none.
        self._filter = ByLabelFilter(ROLE_LABEL, _ROLES[role], allows_no_label=role == "decode")

    def filter(self, request: PluginRequest, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        """Those with the role."""
        return self._filter.filter(request, endpoints)


class HeaderLabelScorer:
    """1 for endpoints whose label says what the request's header says, 0 for the others."""

    def __init__(self, header: str, label: str) -> None:
        self._header = header
        self._label = label

    @classmethod
    def read(cls, parameters: Fields) -> HeaderLabelScorer:
        """From a configuration."""
        known = parameters.only("headerName", "labelKey")
        return cls(known.text("headerName").lower(), known.text("labelKey"))

    def score(self, request: PluginRequest, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        """One score for each endpoint; 0 for all where the request has no such header."""
        asked = request.headers.get(self._header)
        return [float(bool(asked) and endpoint.labels.get(self._label) == asked) for endpoint in endpoints]


class HeaderTestingFilter:
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


def _in(key: str, values: Sequence[str]) -> _Rule:
    return lambda labels: labels.get(key) in values


def _expression(operator: str, key: str, values: Sequence[str]) -> _Rule:
    if operator == "In":
        return _in(key, values)
    if operator == "NotIn":
        return lambda labels: labels.get(key) not in values
    return lambda labels: (key in labels) == (operator == "Exists")
