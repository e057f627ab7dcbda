"""Cache salts per tenant, derived from a request header that the gateway sets.

Engines share cached blocks only between requests with equal salts. A client that chooses its own salt could
choose another tenant's and learn from response times what that tenant sent.
"""

from __future__ import annotations

import hmac
import re
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec.structs import replace

from router.errors import ConfigError, RequestError
from router.prompts.parsers import Api
from router.prompts.request import RouteRequest

SALT_FIELDS = ("cache_salt", "extra_key")
"""Body fields of engines from which a salt is read; a client's own are removed."""

_TENANT_CHARS_MAX = 1024
_KEY_BYTES_MIN, _KEY_BYTES_MAX = 16, 4096
# Paths of POST requests for which engines compute text only, and so cache nothing.
_TEXT_ONLY = ("/tokenize", "/detokenize", "/render", "/count_tokens", "/conversations")
# Engines drop a fragment, which gateways may pass on.
_QUERY = re.compile("[?#]")
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True, slots=True)
class TenantSalt:
    """Salts requests by HMAC-SHA256 of a request header. Thread-safe."""

    header: str  # lower case
    key: bytes

    @classmethod
    def load(cls, header: str | None, key_file: Path | None) -> TenantSalt | None:
        """Read the key; return None if no header is configured.

        Raises:
            ConfigError: The key is missing, unreadable, too short or too long.
        """
        if header is None and key_file is None:
            return None
        if header is None or key_file is None:
            raise ConfigError("--salt-from and --salt-key-file must be given together")
        try:
            key = key_file.read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"--salt-key-file {key_file}: cannot be read: {error}") from error
        if not _KEY_BYTES_MIN <= len(key) <= _KEY_BYTES_MAX:
            expected = f"expected {_KEY_BYTES_MIN} to {_KEY_BYTES_MAX} bytes, got {len(key)}"
            raise ConfigError(f"--salt-key-file {key_file}: {expected}; make it with: openssl rand -hex 32")
        return cls(header, key)

    def applied(self, request: RouteRequest, api: Api, path: str, body: bytes) -> tuple[RouteRequest, bytes]:
        """Return the request and its body with the tenant's salt; `body` has no `SALT_FIELDS` of clients.

        Raises:
            RequestError: 400: the tenant's header or the API's salt is missing; 431: the header is long.
        """
        if not body or _QUERY.split(path, 1)[0].endswith(_TEXT_ONLY):
            return request, body
        if not api.salt_field:
            raise RequestError(
                400, f"{path[:256]} has no cache salt, and this router separates tenants by it"
            )
        tenant = request.headers.get(self.header, "")
        # Headers with bytes that are not UTF-8 would be the same tenant.
        if not tenant or "\ufffd" in tenant:
            raise RequestError(
                400, f"the header {self.header}, which names the tenant, is missing or invalid"
            )
        if len(tenant) > _TENANT_CHARS_MAX:
            raise RequestError(431, f"the header {self.header} is longer than {_TENANT_CHARS_MAX} characters")
        salt = hmac.digest(self.key, tenant.encode("utf-8", "replace"), "sha256").hex()
        fields = _FIELDS.decode(body)
        fields[api.salt_field] = msgspec.Raw(msgspec.json.encode(salt))
        # Remote tokenizers send the request's fields to engines, so the client's salt must not remain there.
        parsed = {name: value for name, value in request.body.items() if name not in SALT_FIELDS}
        return replace(request, cache_salt=salt, body=parsed), msgspec.json.encode(fields)

    def refusal(self, service: str) -> RequestError:
        """Return the error for a request whose body the calling service cannot change."""
        text = "--salt-from needs to change bodies, which only ext_proc can do with the whole body"
        return RequestError(500, f"{text}, not {service}")
