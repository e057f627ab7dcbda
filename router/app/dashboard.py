"""Dashboard at / of the metrics port: its page, and what one viewer receives as server-sent events.

The page is one file without assets from elsewhere. Events are `pods`, the content of /debug/pods, and
`decisions`: a bounded sample of the new ones, and the reports on those sent before. A viewer that reads
slowly receives fewer events, not older ones. Nothing runs while nobody looks.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable
from importlib import resources
from itertools import count
from typing import Any

import msgspec

from common.page_server import Response
from router.observe.decision_log import DecisionLog

DASHBOARD = "/"
TICK_S = 0.25
STREAM_S_MAX = 600.0
_PODS_EVERY_TICKS = 4
_FIRST_DECISIONS, _DECISIONS_PER_TICK = 30, 6
# Decisions sent whose first token or end is not reported yet.
_OPEN_MAX = 64
_INLINE = re.compile(rb"<(script|style)>(.*?)</", re.DOTALL)


def dashboard_page() -> Response:
    """Return the page. Browsers run and apply only what is in it, and connect only to this port."""
    page = resources.files(__package__).joinpath("dashboard.html").read_bytes()
    sources = {"connect-src": "'self'", "img-src": "data:", "base-uri": "'none'", "form-action": "'none'"}
    for tag, content in _INLINE.findall(page):
        digest = base64.b64encode(hashlib.sha256(content).digest()).decode()
        sources[f"{tag.decode()}-src"] = f"'sha256-{digest}'"
    policy = "; ".join(f"{name} {value}" for name, value in sources.items())
    headers = {
        "Content-Security-Policy": f"default-src 'none'; frame-ancestors 'none'; {policy}",
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return Response(200, page, "text/html; charset=utf-8", headers)


class Watch:
    """State of one viewer's stream.

    Args:
        log: Decisions to sample.
        pods: Returns the encoded state of the pods.
    """

    def __init__(self, log: DecisionLog, pods: Callable[[], bytes]) -> None:
        self._log, self._pods = log, pods
        self._ticks = count()
        self._decided: int | None = None  # decisions before the next sample; None before the first
        self._open: dict[str, dict[str, Any]] = {}  # what was last sent by request id, oldest first

    def next_part(self) -> bytes:
        """Return the events since the last call, or a comment that keeps the connection open."""
        parts = [self._decisions()]
        if next(self._ticks) % _PODS_EVERY_TICKS == 0:
            parts.append(_event("pods", self._pods()))
        return b"".join(parts) or b":\n\n"

    def _decisions(self) -> bytes:
        before = self._decided
        most = _FIRST_DECISIONS if before is None else _DECISIONS_PER_TICK
        self._decided, rows = self._log.sample(before, most)
        changed = []
        for request_id, sent in list(self._open.items()):
            row = self._log.find(request_id, brief=True)
            if row is None or row["end"] is not None:
                del self._open[request_id]
            else:
                self._open[request_id] = row
            if row is not None and row != sent:
                changed.append(row)
        self._open |= {row["request_id"]: row for row in reversed(rows)}
        while len(self._open) > _OPEN_MAX:
            del self._open[next(iter(self._open))]
        if not (rows or changed):
            return b""
        left_out = 0 if before is None else self._decided - before - len(rows)
        event = {"decisions": rows, "changed": changed, "left_out": left_out, "decided": self._decided}
        return _event("decisions", msgspec.json.encode(event))


def _event(name: str, data: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)
