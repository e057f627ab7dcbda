"""Plugins that use pod labels, request headers and sessions: selectors, roles, affinity, test selection.

Session affinity takes a session's last endpoint from a token in a request header or from a table of session
ids. A token is base64 of "namespace/name", as in llm-d; the response sets it for the client.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from msgspec import Meta, field

from router.config.fields import Number, Settings, Text
from router.picking.candidates import SessionPods
from router.plugins.api import Endpoint, PluginRequest
from router.pods.pod_set import ROLE_LABEL
from router.prompts.request import SESSION_ID_HEADER

SELECTION_HEADER = "test-epp-endpoint-selection"

_ROLES = {
    "decode": ("decode", "encode-decode", "prefill-decode", "encode-prefill-decode", "both"),
    "prefill": ("prefill", "encode-prefill", "prefill-decode", "encode-prefill-decode", "both"),
    "encode": ("encode", "encode-prefill", "encode-decode", "encode-prefill-decode"),
}

TOKEN_HEADER = "x-session-token"

_TOKEN_CHARS_MAX = 1024


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
        named = [one for one in endpoints if self.match_labels.items() <= one.labels.items()]
        return [one for one in named if all(each.matches(one.labels) for each in self.match_expressions)]


class ByLabelFilter(Settings):
    """llm-d's older form of a label filter: one label with a list of valid values."""

    label: Text
    valid_values: tuple[Text, ...] = ()
    allows_no_label: bool = False

    def __post_init__(self) -> None:
        if not self.valid_values and not self.allows_no_label:
            raise ValueError("validValues: expected at least one value, or allowsNoLabel: true")

    def filter(self, _request: PluginRequest, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        allowed = (*self.valid_values, *((None,) if self.allows_no_label else ()))
        return [endpoint for endpoint in endpoints if endpoint.labels.get(self.label) in allowed]


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


class _Source(Settings):
    """Source of a session id: a request header, or an attribute named by its key or its producer."""

    header: Text | None = None
    attribute: Text | None = None
    producer: Text | None = None

    def __post_init__(self) -> None:
        if (self.header is None) == (self.attribute is None):
            raise ValueError("needs either a header or an attribute")

    def session(self, request: PluginRequest) -> str | None:
        if self.header is not None:
            return request.headers.get(self.header.lower())
        return request.attributes.get(self.producer or self.attribute or "")


class _TokenConfig(Settings):
    header: Text = TOKEN_HEADER


class _SessionConfig(Settings):
    sources: tuple[_Source, ...] = ()
    eviction_ttl_seconds: Annotated[float, Meta(ge=1.0, le=1e12)] = 300.0
    eviction_sweep_seconds: Number = 10.0


class SessionAffinity(Settings):
    """Prefers the last endpoint of the session while it is a candidate."""

    strategy: Literal["encoded_endpoint_header", "session_id"] = "encoded_endpoint_header"
    profile_name: str = ""  # profile whose pick is recorded; "": the destination
    encoded_endpoint_header_config: _TokenConfig = field(default_factory=_TokenConfig)
    session_id_config: _SessionConfig = field(default_factory=_SessionConfig)

    def __post_init__(self) -> None:
        self._uses_ids = self.strategy == "session_id"
        self._header = self.encoded_endpoint_header_config.header.lower()
        config = self.session_id_config
        self._sources = config.sources or (_Source(header=SESSION_ID_HEADER),)
        self._sessions = SessionPods(config.eviction_ttl_seconds)

    def filter(self, request: PluginRequest, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        last = self._last(request)
        kept = [endpoint for endpoint in endpoints if endpoint.id == last]
        return kept or endpoints

    def score(self, request: PluginRequest, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        last = self._last(request)
        return [float(endpoint.id == last) for endpoint in endpoints]

    def picked(self, request: PluginRequest, targets: Mapping[str, Endpoint]) -> Mapping[str, str]:
        if (endpoint := targets.get(self.profile_name)) is None:
            return {}
        if not self._uses_ids:
            return {self._header: base64.b64encode(endpoint.id.encode()).decode()}
        if session := self._session(request):
            self._sessions.record(session, endpoint.id, request.now_s)
        return {}

    def state(self) -> dict[str, int]:
        """Return the number of sessions in the table, which is empty if clients send tokens."""
        return {"sessions": len(self._sessions)}

    def _last(self, request: PluginRequest) -> str | None:
        """Return the id of the session's last endpoint."""
        if self._uses_ids:
            session = self._session(request)
            return self._sessions.pod_of(session, request.now_s) if session else None
        token = request.headers.get(self._header, "")
        if not 0 < len(token) <= _TOKEN_CHARS_MAX:
            return None
        try:
            return base64.b64decode(token, validate=True).decode("utf-8")
        except ValueError:
            return None

    def _session(self, request: PluginRequest) -> str | None:
        """Return the first valid id that a source provides."""
        for source in self._sources:
            found = source.session(request)
            if found and len(found) <= _TOKEN_CHARS_MAX:
                return found
        return None
