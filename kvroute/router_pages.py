"""Client of a router's debug pages, which its metrics port serves, and the flags that name the port."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

from common.flags import file_flag, flag
from kvroute.http_client import FIELDS, Http
from kvroute.terminal import clean

_READ_S = 30.0
_URL = "URL of the router's metrics port; `kvroute up` prints its own"
_WHY = {
    401: "give --token-file",
    403: "the token's user needs the right to `get` this path",
    404: "is --router-url the metrics port of a router of this version?",
    413: "longer than the router explains (1 MiB)",
}


class PagesError(OSError):
    """The router answered with an error, or without what was asked for."""


@dataclass(frozen=True)
class RouterPages:
    """Client of a router's debug pages; its fields are flags."""

    router_url: str = flag("router", "--router-url", str, "http://127.0.0.1:9090", _URL)
    token_file: Path | None = file_flag("router", "--token-file", "bearer token of the metrics port")
    ca_file: Path | None = file_flag("router", "--ca-file", "PEM certificates that sign an https port's")

    @cached_property
    def http(self) -> Http:
        """Client that sends the token; raises a ValueError if that cannot be read."""
        return Http(self.ca_file, self.token_file)

    def get(self, page: str, posted: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the content of a page, or its answer to a posted JSON value.

        Raises:
            UnreachableError: The router cannot be reached.
            PagesError: It answers with an error.
        """
        url = self.router_url.rstrip("/") + page
        answer = self.http.ask(url, posted, read_s=_READ_S)
        value = answer.read(FIELDS)
        if answer.status in (200, 503) and value and "error" not in value:
            return value
        told = value.get("error", "no page of a router")
        told = _WHY.get(answer.status, told) if not value or told == "not allowed" else told
        raise PagesError(f"{url} answered {answer.status}: {told}")

    def decision(self, request_id: str) -> dict[str, Any]:
        """Return the decision record of a request; raises as `get`, and a PagesError without a record."""
        found = self.get(f"/debug/decisions?request_id={quote(request_id, safe='')}")["decisions"]
        if not found:
            text = "the router has no record of request {}: each router keeps the latest 1,000 of its own"
            raise PagesError(text.format(clean(request_id)))
        return dict(found[0])
