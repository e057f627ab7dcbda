"""Client of a router's debug pages, which its metrics port serves, and the flags that name the port."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.flags import file_flag, flag, flag_values
from kvroute.http_client import FIELDS, Http, UnreachableError

_READ_S = 30.0
_URL = "URL of the router's metrics port; `kvroute up` prints its own"
_WHY = {
    401: "give --token-file",
    403: "the token's user needs the right to `get` this path",
    404: "is --router-url the metrics port of a router of this version?",
    413: "longer than the router explains (1 MiB)",
}


class PagesError(Exception):
    """The router did not answer. Commands print the message and exit with status 1."""


@dataclass(frozen=True, slots=True)
class PagesOptions:
    """Where the router's debug pages are."""

    router_url: str = flag("router", "--router-url", str, "http://127.0.0.1:9090", _URL)
    token_file: Path | None = file_flag("router", "--token-file", "bearer token of the metrics port")
    ca_file: Path | None = file_flag("router", "--ca-file", "PEM certificates that sign an https port's")


class RouterPages:
    """Client of the router that a command line names, by the flags of `PagesOptions`.

    Raises:
        PagesError: The token cannot be read.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        options = PagesOptions(**flag_values(PagesOptions, arguments))
        self._url, token = options.router_url.rstrip("/"), None
        if options.token_file is not None:
            try:
                token = options.token_file.read_text("utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise PagesError(f"--token-file {options.token_file}: cannot be read: {error}") from error
        self._http = Http(options.ca_file, token)

    def get(self, page: str, posted: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the content of a page, or its answer to a posted JSON value.

        Raises:
            PagesError: The router cannot be reached, or answers with an error.
        """
        url = self._url + page
        try:
            answer = self._http.ask(url, posted, read_s=_READ_S)
        except UnreachableError as error:
            raise PagesError(str(error)) from error
        value = answer.read(FIELDS)
        if answer.status in (200, 503) and value and "error" not in value:
            return value
        told = value.get("error", "no page of a router")
        told = _WHY.get(answer.status, told) if not value or told == "not allowed" else told
        raise PagesError(f"{url} answered {answer.status}: {told}")
