"""Sessions that stay at their endpoint: a token in a header, or a session's id, in; its last endpoint out.

One object filters and scores. Tokens are base64 of "namespace/name", as the reference's; the response carries
them back to the client.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from msgspec import Meta, field

from router.config_fields import Number, Settings, Text
from router.plugins.api import Endpoint, PluginRequest
from router.sessions import SESSION_ID_HEADER, Sessions

TOKEN_HEADER = "x-session-token"

_TOKEN_CHARS_MAX = 1024
_DESTINATION = ""


class TokenHeader:
    """The client keeps the endpoint's id, in a header."""

    def __init__(self, header: str = TOKEN_HEADER) -> None:
        self._header = header

    def __len__(self) -> int:
        return 0

    def last(self, request: PluginRequest) -> str | None:
        token = request.headers.get(self._header, "")
        if not 0 < len(token) <= _TOKEN_CHARS_MAX:
            return None
        try:
            return base64.b64decode(token, validate=True).decode("utf-8")
        except (binascii.Error, UnicodeDecodeError, ValueError):
            return None

    def remember(self, _request: PluginRequest, endpoint: Endpoint) -> Mapping[str, str]:
        """The token for the client."""
        return {self._header: base64.b64encode(endpoint.id.encode()).decode()}


class SessionIds:
    """We keep the endpoint's id, by the session's; the first source that names a session counts.

    Args:
        sources: (kind, name): "header" and its name, or "attribute" and a producer's.
    """

    def __init__(self, sources: Sequence[tuple[str, str]], ttl_s: float = 300.0) -> None:
        self._sources = tuple(sources)
        self._sessions = Sessions(ttl_s)

    def __len__(self) -> int:
        return len(self._sessions)

    def last(self, request: PluginRequest) -> str | None:
        session = self._session(request)
        return self._sessions.pod_of(session, request.now_s) if session else None

    def remember(self, request: PluginRequest, endpoint: Endpoint) -> Mapping[str, str]:
        """Takes note; the client need not know."""
        if session := self._session(request):
            self._sessions.moved(session, endpoint.id, request.now_s)
        return {}

    def _session(self, request: PluginRequest) -> str | None:
        for kind, name in self._sources:
            found = request.headers.get(name) if kind == "header" else request.attributes.get(name)
            if found and len(found) <= _TOKEN_CHARS_MAX:
                return found
        return None


class _Source(Settings):
    """The attribute is named by its key or by who produces it; there is one attribute for each producer."""

    header: Text | None = None
    attribute: Text | None = None
    producer: Text | None = None

    def __post_init__(self) -> None:
        if (self.header is None) == (self.attribute is None):
            raise ValueError("needs either a header or an attribute")

    def named(self) -> tuple[str, str]:
        if self.header is not None:
            return "header", self.header.lower()
        return "attribute", self.producer or self.attribute or ""


class _TokenConfig(Settings):
    header: Text = TOKEN_HEADER


class _SessionConfig(Settings):
    sources: tuple[_Source, ...] = ()
    eviction_ttl_seconds: Annotated[float, Meta(ge=1.0, le=1e12)] = 300.0
    eviction_sweep_seconds: Number = 10.0


class SessionAffinity(Settings):
    """Keeps to the endpoint of the session, as long as it is among the candidates."""

    strategy: Literal["encoded_endpoint_header", "session_id"] = "encoded_endpoint_header"
    profile_name: str = _DESTINATION  # whose pick counts; "": the destination
    encoded_endpoint_header_config: _TokenConfig = field(default_factory=_TokenConfig)
    session_id_config: _SessionConfig = field(default_factory=_SessionConfig)

    def __post_init__(self) -> None:
        self._memory: TokenHeader | SessionIds
        if self.strategy == "encoded_endpoint_header":
            self._memory = TokenHeader(self.encoded_endpoint_header_config.header.lower())
        else:
            config = self.session_id_config
            sources = [source.named() for source in config.sources] or [("header", SESSION_ID_HEADER)]
            self._memory = SessionIds(sources, config.eviction_ttl_seconds)

    def filter(self, request: PluginRequest, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        last = self._memory.last(request)
        kept = [endpoint for endpoint in endpoints if endpoint.id == last]
        return kept or endpoints

    def score(self, request: PluginRequest, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        last = self._memory.last(request)
        return [float(endpoint.id == last) for endpoint in endpoints]

    def picked(self, request: PluginRequest, targets: Mapping[str, Endpoint]) -> Mapping[str, str]:
        endpoint = targets.get(self.profile_name)
        return {} if endpoint is None else self._memory.remember(request, endpoint)

    def state(self) -> dict[str, int]:
        """How many sessions are remembered here; of tokens the clients remember them."""
        return {"sessions": len(self._memory)}
