"""Boundary of trust: what Envoy and the router exchange, and what clients must not send.

Names of headers and metadata follow the endpoint picker protocol v1.0.0 (Gateway API Inference Extension,
proposal 004). KV transfer parameters name hosts, engines and blocks: a client that sends them could crash an
engine, poison its cache or read prompts of other users. Engines share cached blocks only between requests
with equal salts: a client that chooses its own salt could choose another tenant's and learn from response
times what that tenant sent.
"""

from __future__ import annotations

import hmac
import json
import re
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import InitVar, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
from envoy.config.core.v3 import base_pb2
from google.protobuf import struct_pb2
from msgspec.structs import replace

from router.errors import DROPPED_REASON_HEADER, ConfigError, RequestError
from router.prompts.parsers import Api
from router.prompts.request import RouteRequest

DESTINATION_HEADER = "x-gateway-destination-endpoint"
REQUEST_ID_HEADER = "x-request-id"

# Metadata namespace and field in which a gateway lists the allowed endpoints.
SUBSET_NAMESPACE, SUBSET_HEADER = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
SERVED_HEADER = "x-gateway-destination-endpoint-served"

GATEWAY_ONLY_HEADERS: tuple[str, ...] = (
    # Endpoint picker protocol: the picked pod, the allowed pods, the pod that served the request.
    "x-gateway-destination-endpoint",
    "x-gateway-destination-endpoint-subset",
    "x-gateway-destination-endpoint-served",
    # Disaggregated serving and KV transfer: hosts to which an engine or its sidecar connects.
    "x-prefiller-host-port",
    "x-encoder-hosts-ports",
    "x-kv-cache-source-host-port",
    # Data-parallel engine within a pod: vLLM reads the rank.
    "x-data-parallel-rank",
    "x-data-parallel-host-port",
    # Set by Envoy where ext_authz receives a truncated body; such a body is not parsed.
    "x-envoy-auth-partial-body",
)
"""Headers that clients must not send, because engines and sidecars obey them; lower case.

Envoy removes them before any filter runs (`kvroute.envoy_config`, the chart), so values that a filter sets
later are kept. Some of these headers the router itself does not use.
"""

_DESTINATION_NAMESPACE = "envoy.lb"
_REQUEST_ID_MAX = 256

# Headers that only gateway and picker may set: a client's are removed. (The destination is overwritten.)
_SYSTEM_OWNED = frozenset(
    {
        # Envoy rejects changes to headers of its own prefix.
        *(name for name in GATEWAY_ONLY_HEADERS if not name.startswith("x-envoy-")),
        DROPPED_REASON_HEADER,
        "x-llm-d-inference-fairness-id",
        "x-gateway-inference-fairness-id",
        "x-llm-d-inference-objective",
        "x-gateway-inference-objective",
        "x-llm-d-model-name-rewrite",
        "x-gateway-model-name-rewrite",
        "x-llm-d-slo-ttft-ms",
        "x-slo-ttft-ms",
        "x-llm-d-slo-tpot-ms",
        "x-slo-tpot-ms",
        "x-llm-d-video-fps",
        "x-llm-d-video-duration-seconds",
        "x-llm-d-video-resolution",
    }
) - {DESTINATION_HEADER}

GATEWAY_ONLY_FIELDS = (
    # vLLM, TensorRT-LLM
    "kv_transfer_params",
    "ec_transfer_params",
    "kv_hints",
    "disaggregated_params",
    # SGLang
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    "decode_tp_size",
    "disagg_prefill_dp_rank",
    "routed_dp_rank",
    "data_parallel_rank",
    # Dynamo
    "backend_instance_id",
    "prefill_worker_id",
    "decode_worker_id",
)
"""Forbidden fields by default."""

# Objects from which engines read further parameters.
_CONTAINERS = frozenset({"vllm_xargs", "sampling_params", "extra_args", "extra_body", "nvext"})
_RAW_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_RAW_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])
# Form bodies carry fields outside of JSON.
_FORMS = ("multipart/", "application/x-www-form-urlencoded")

# Body fields of engines from which a salt is read; a client's own are removed.
SALT_FIELDS = ("cache_salt", "extra_key")
_TENANT_CHARS_MAX = 1024
_KEY_BYTES_MIN, _KEY_BYTES_MAX = 16, 4096
# Paths of POST requests for which engines compute text only, and so cache nothing.
_TEXT_ONLY = ("/tokenize", "/detokenize", "/render", "/count_tokens", "/conversations")
# Engines drop a fragment, which gateways may pass on.
_QUERY = re.compile("[?#]")


def system_owned(incoming: Collection[str], ours: Collection[str] = ()) -> tuple[str, ...]:
    """Return the names in `incoming` to remove before the request reaches a pod, except those in `ours`."""
    if _SYSTEM_OWNED.isdisjoint(incoming):
        return ()
    return tuple(name for name in incoming if name in _SYSTEM_OWNED and name not in ours)


def accepted_request_id(headers: Mapping[str, str]) -> tuple[str, bool]:
    """Return the request id and whether the gateway sent it; an unusable id is replaced by a uuid4."""
    given = headers.get(REQUEST_ID_HEADER, "")
    # Envoy's access log writes other ids differently, so they would never match their request.
    if 0 < len(given) <= _REQUEST_ID_MAX and given.isascii() and given.isprintable():
        return given, True
    return str(uuid.uuid4()), False


def subset_hint(metadata: base_pb2.Metadata) -> frozenset[str] | None:
    """Return the endpoints that the gateway allows, from a message's metadata; None if it has no list."""
    hint = metadata.filter_metadata.get(SUBSET_NAMESPACE)
    if hint is None or SUBSET_HEADER not in hint.fields:
        return None
    value = hint.fields[SUBSET_HEADER]
    texts = [item.string_value for item in value.list_value.values] or [value.string_value]
    return frozenset(part.strip() for text in texts for part in text.split(",") if part.strip())


def served_endpoint(metadata: base_pb2.Metadata) -> str | None:
    """Return the endpoint that served the request, from a response's metadata; None if not reported."""
    values = metadata.filter_metadata.get(_DESTINATION_NAMESPACE)
    if values is None or SERVED_HEADER not in values.fields:
        return None
    return values.fields[SERVED_HEADER].string_value or None


@lru_cache(maxsize=4096)
def destination_metadata(destination: str) -> struct_pb2.Struct:
    """Return the picked endpoint as dynamic metadata."""
    metadata = struct_pb2.Struct()
    metadata.update({_DESTINATION_NAMESPACE: {DESTINATION_HEADER: destination}})
    return metadata


def error_headers(error: RequestError) -> dict[str, str]:
    """Return the headers of an error response that the router sends to a client."""
    headers = {"content-type": "application/json"}
    if error.dropped_reason is not None:
        headers[DROPPED_REASON_HEADER] = error.dropped_reason
    return headers


@dataclass(eq=False)
class BodyGuard:
    """Finds and removes the fields that clients must not send. Thread-safe.

    A field is forbidden at the top level of a JSON object and inside the objects that carry extra parameters
    (`vllm_xargs`, `sampling_params`, `extra_args`, `extra_body`, `nvext`). A null field counts as absent.
    """

    names: InitVar[Collection[str]] = GATEWAY_ONLY_FIELDS  # forbidden fields; empty to check nothing
    # Returns whether engines have a KV connector; if so, bodies that cannot be checked are rejected.
    has_connector: Callable[[], bool] = lambda: False

    def __post_init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._checked_fields = self._names | _CONTAINERS if names else frozenset()

    def forbidden(self, request: RouteRequest, body: bytes | bytearray) -> str | None:
        """Return the path of a forbidden field, such as `vllm_xargs.kv_hints`; None if there is none.

        Args:
            request: Request parsed from `body`; its own `body` is empty for an unknown API.

        Raises:
            RequestError: 400: the body cannot be checked and the pool has a KV connector, or it has a
                forbidden field in non-standard JSON, from which no field can be removed.
        """
        if not self._checked_fields or not body:
            return None
        try:
            fields = request.body or self._decoded(body, request.headers)
            return None if self._checked_fields.isdisjoint(fields) else self._first_forbidden(fields)
        except RecursionError as error:
            raise RequestError(400, "the request body is nested too deeply") from error

    def unchecked(self) -> None:
        """Decide whether a body that the router cannot read may pass.

        Raises:
            RequestError: 400: engines of the pool have a KV connector.
        """
        if self._checked_fields and self.has_connector():
            raise RequestError(
                400,
                "the request body cannot be checked for fields that only the gateway may send: send a JSON "
                "object, whole and not larger than the gateway reads",
            )

    def without(self, body: bytes | bytearray | msgspec.Raw) -> bytes:
        """Return a JSON object without its forbidden fields; other values are copied unchanged."""
        fields = _RAW_FIELDS.decode(body)
        for name in self._checked_fields.intersection(fields):
            if name in self._names:
                del fields[name]
            else:
                fields[name] = self._allowed_inside(fields[name])
        return msgspec.json.encode(fields)

    def _decoded(self, body: bytes | bytearray, headers: Mapping[str, str]) -> Mapping[str, Any]:
        """Return the fields to check of a body of an unknown API."""
        if headers.get("content-type", "").lower().startswith(_FORMS):
            self.unchecked()
        try:
            fields = _RAW_FIELDS.decode(body)
            return {
                name: msgspec.json.decode(fields[name]) for name in self._checked_fields.intersection(fields)
            }
        except ValueError:
            return self._leniently_decoded(body)

    def _leniently_decoded(self, body: bytes | bytearray) -> Mapping[str, Any]:
        """Check JSON that only Python's reader accepts (BOM, UTF-16, NaN), which engines use."""
        try:
            fields = json.loads(body)
        except ValueError:
            self.unchecked()
            return {}
        if isinstance(fields, dict) and (field := self._first_forbidden(fields)) is not None:
            raise refusal(field)
        return {}

    def _first_forbidden(self, fields: Mapping[str, Any]) -> str | None:
        for name in fields:
            value = fields[name]
            if name in self._names and value is not None:
                return name
            if name in _CONTAINERS:
                for inner in value if isinstance(value, list) else (value,):
                    if isinstance(inner, dict) and (found := self._first_forbidden(inner)) is not None:
                        return f"{name}.{found}"
        return None

    def _allowed_inside(self, value: msgspec.Raw) -> msgspec.Raw:
        """Return a container's value, an object or a list of them, without forbidden fields."""
        first = bytes(value).lstrip()[:1]
        if first == b"{":
            return msgspec.Raw(self.without(value))
        if first == b"[":
            items = [self._allowed_inside(item) for item in _RAW_ITEMS.decode(value)]
            return msgspec.Raw(msgspec.json.encode(items))
        return value


def refusal(field: str) -> RequestError:
    """Return the error for a client that sent a forbidden field."""
    return RequestError(400, f"{field} must not be sent by clients: only the gateway may set it", field)


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
        fields = _RAW_FIELDS.decode(body)
        fields[api.salt_field] = msgspec.Raw(msgspec.json.encode(salt))
        # Remote tokenizers send the request's fields to engines, so the client's salt must not remain there.
        parsed = {name: value for name, value in request.body.items() if name not in SALT_FIELDS}
        return replace(request, cache_salt=salt, body=parsed), msgspec.json.encode(fields)

    def refusal(self, service: str) -> RequestError:
        """Return the error for a request whose body the calling service cannot change."""
        text = "--salt-from needs to change bodies, which only ext_proc can do with the whole body"
        return RequestError(500, f"{text}, not {service}")
