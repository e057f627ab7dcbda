"""POST /debug/explain: the decision that a request would get now, without sending the request."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from router.doors.ext_proc_dialects import NativeDialect
from router.errors import RequestError
from router.observe.decision_log import DecisionLog
from router.observe.metrics import RouterMetrics
from router.prompts.request import unread_request

EXPLAIN_PATH = "/debug/explain"
_REQUEST_ID = "explain"


class _Asked(msgspec.Struct):
    """Request to explain, as a client would send it to the gateway."""

    body: msgspec.Raw
    path: str = "/v1/chat/completions"
    headers: dict[str, str] = {}
    pool: str = ""  # InferencePool, where the router has several; "": its first


_ASKED = msgspec.json.Decoder(_Asked)


@dataclass(frozen=True, slots=True)
class Explainer:
    """Explains requests as ext_proc would route them: its parsers, model rewrites, salts and pools."""

    decision_log: DecisionLog
    _dialects: dict[str, NativeDialect] = field(default_factory=dict)  # by pool, the router's first one first

    def add(self, pool: str, dialect: NativeDialect) -> None:
        """Add the dialect of a pool, which will count nothing."""
        self._dialects[pool] = replace(dialect, metrics=RouterMetrics(CollectorRegistry()))

    def answer(self, data: bytes) -> tuple[int, Mapping[str, Any]]:
        """Return status and record of the decision, as in /debug/decisions; nothing is kept of either."""
        try:
            asked = _ASKED.decode(data)
            dialect = self._dialects.get(asked.pool or next(iter(self._dialects)))
            if dialect is None:
                raise RequestError(404, f"pool: unknown; this router serves {', '.join(self._dialects)}")
            headers = {name.lower(): value for name, value in asked.headers.items()} | {":path": asked.path}
            unread = unread_request(_REQUEST_ID, len(asked.body), None, headers)
            request, _ = dialect.parse(unread, bytes(asked.body))
            decision = dialect.router.explain(request, time.monotonic())
        except RequestError as error:
            return error.status, {"error": str(error)}
        except (ValueError, RecursionError) as error:
            return 400, {"error": f"{EXPLAIN_PATH}: {error}"}
        return 200, self.decision_log.converted(decision)
