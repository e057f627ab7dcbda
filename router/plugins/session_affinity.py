"""SessionPods that stay at their endpoint: a token in a header, or a session's id, in; its last endpoint out.

One object filters and scores. Tokens are base64 of "namespace/name", as the reference's; the response carries
them back to the client.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from msgspec import Meta, field

from router.config.fields import Number, Settings, Text
from router.picking.sessions import SESSION_ID_HEADER, SessionPods
from router.plugins.api import Endpoint, PluginRequest

TOKEN_HEADER = "x-session-token"

_TOKEN_CHARS_MAX = 1024


class _Source(Settings):
    """The attribute is named by its key or by who produces it; there is one attribute for each producer."""

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
    """Keeps to the endpoint of the session, as long as it is among the candidates."""

    strategy: Literal["encoded_endpoint_header", "session_id"] = "encoded_endpoint_header"
    profile_name: str = ""  # whose pick counts; "": the destination
    encoded_endpoint_header_config: _TokenConfig = field(default_factory=_TokenConfig)
    session_id_config: _SessionConfig = field(default_factory=_SessionConfig)

    def __post_init__(self) -> None:
        self._keeps_ids = self.strategy == "session_id"
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
        if not self._keeps_ids:
            return {self._header: base64.b64encode(endpoint.id.encode()).decode()}
        if session := self._session(request):
            self._sessions.record(session, endpoint.id, request.now_s)
        return {}

    def state(self) -> dict[str, int]:
        """How many sessions are remembered here; of tokens the clients remember them."""
        return {"sessions": len(self._sessions)}

    def _last(self, request: PluginRequest) -> str | None:
        """The id of the session's last endpoint."""
        if self._keeps_ids:
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
        """The first id that a source names."""
        for source in self._sources:
            found = source.session(request)
            if found and len(found) <= _TOKEN_CHARS_MAX:
                return found
        return None
