"""HTTP client of the commands: bounded in time and size, without retries or redirects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import urllib3

CONNECT_S = 2.0
_BODY_BYTES_MAX = 64 << 20
_IDLE_MAX = 32  # connections of a server that are kept
_T = TypeVar("_T")
FIELDS = msgspec.json.Decoder(dict[str, Any])


class UnreachableError(OSError):
    """Request without a response; `is_hung` tells that it was sent, but not answered in time."""

    def __init__(self, url: str, error: Exception) -> None:
        self.is_hung = isinstance(error, urllib3.exceptions.ReadTimeoutError)
        super().__init__(f"{url}: {str(error).rpartition(': ')[2]}")


@dataclass(frozen=True, slots=True)
class Answer:
    """HTTP response."""

    status: int
    headers: Mapping[str, str]  # names are matched without regard to case
    body: bytes

    def read(self, decoder: msgspec.json.Decoder[_T]) -> _T:
        """Return the decoded body; of another body the defaults of the decoder's type."""
        try:
            return decoder.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return decoder.type()

    def get(self, *path: str) -> Any:
        """Return a field of a JSON body by its path; None if it has none."""
        value: Any = self.read(FIELDS)
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        return value

    @property
    def text(self) -> str:
        return f"{self.status}: {self.body[:300].decode(errors='replace').strip()}"


class Http:
    """HTTP client. `ca_file`: PEM of the authorities for https; `token_file`: bearer token of all requests.

    Raises:
        ValueError: The token cannot be read.
    """

    def __init__(self, ca_file: Path | None = None, token_file: Path | None = None) -> None:
        ca = None if ca_file is None else str(ca_file)
        self._pool = urllib3.PoolManager(maxsize=_IDLE_MAX, retries=False, ca_certs=ca)
        self._headers = {}
        if token_file is not None:
            try:
                self._headers["authorization"] = f"Bearer {token_file.read_text('utf-8').strip()}"
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"{token_file}: the token cannot be read: {error}") from error

    def ask(self, url: str, body: Mapping[str, Any] | None = None, *, read_s: float = 60.0) -> Answer:
        """Send a GET, or a POST with a JSON body; raises an UnreachableError without a response."""
        with self.open(url, body, read_s=read_s) as response:
            return Answer(response.status, response.headers, response.read(_BODY_BYTES_MAX))

    @contextmanager
    def open(
        self, url: str, body: Mapping[str, Any] | None = None, *, read_s: float = 60.0
    ) -> Iterator[urllib3.BaseHTTPResponse]:
        """Send a request as `ask`, and yield the response with its body unread."""
        method, timeout = "GET" if body is None else "POST", urllib3.Timeout(connect=CONNECT_S, read=read_s)
        more: dict[str, Any] = {"headers": self._headers, "timeout": timeout, "redirect": False}
        try:
            with closing(self._pool.request(method, url, json=body, preload_content=False, **more)) as opened:
                yield opened
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise UnreachableError(url, error) from error
