"""Session affinity plugin: keeps a session's requests on its last endpoint, as a filter or as a scorer.

The last endpoint comes from a token in a request header or from a table of session ids. A token is base64 of
"namespace/name", as in llm-d; the response sets it for the client.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from msgspec import Meta, field

from router.config.fields import Number, Settings, Text
from router.picking.affinity import SessionPods
from router.plugins.api import Endpoint, PluginRequest
from router.prompts.request import SESSION_ID_HEADER

TOKEN_HEADER = "x-session-token"

_TOKEN_CHARS_MAX = 1024


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
