"""The headers in which agents name their session; values only."""

from __future__ import annotations

from collections.abc import Mapping

# The first of these that a request carries counts.
AGENT_HEADERS = ("x-claude-code-session-id", "x-session-affinity", "session-id", "session_id")


def agent_session(headers: Mapping[str, str]) -> str | None:
    """The session's id; None: the request is no agent's."""
    return next((headers[name] for name in AGENT_HEADERS if headers.get(name)), None)
