"""Detection and removal of body fields that only gateways may send to a model server.

KV transfer parameters name hosts, engines and blocks. A client that sends them could crash an engine, poison
its cache or read prompts of other users.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec

from router.errors import RequestError
from router.prompts.request import RouteRequest

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


class BodyGuard:
    """Finds and removes the fields that clients must not send. Thread-safe.

    A field is forbidden at the top level of a JSON object and inside the objects that carry extra parameters
    (`vllm_xargs`, `sampling_params`, `extra_args`, `extra_body`, `nvext`). A null field counts as absent.

    Args:
        names: Names of the forbidden fields; empty to check nothing.
        has_connector: Returns whether engines of the pool have a KV connector; if so, bodies that cannot be
            checked are rejected.
    """

    def __init__(
        self,
        names: Collection[str] = GATEWAY_ONLY_FIELDS,
        has_connector: Callable[[], bool] = lambda: False,
    ) -> None:
        self._names = frozenset(names)
        self._checked_fields = self._names | _CONTAINERS if names else frozenset()
        self._has_connector = has_connector

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
        if self._checked_fields and self._has_connector():
            raise RequestError(
                400,
                "the request body cannot be checked for fields that only the gateway may send: send a JSON "
                "object, whole and not larger than the gateway reads",
            )

    def without(self, body: bytes | bytearray) -> bytes:
        """Return a JSON object without its forbidden fields; other values are copied unchanged."""
        return msgspec.json.encode(self._allowed(body))

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

    def _allowed(self, body: bytes | bytearray | msgspec.Raw) -> dict[str, msgspec.Raw]:
        fields = _RAW_FIELDS.decode(body)
        for name in self._checked_fields.intersection(fields):
            if name in self._names:
                del fields[name]
            else:
                fields[name] = self._allowed_inside(fields[name])
        return fields

    def _allowed_inside(self, value: msgspec.Raw) -> msgspec.Raw:
        """Return a container's value, an object or a list of them, without forbidden fields."""
        first = bytes(value).lstrip()[:1]
        if first == b"{":
            return msgspec.Raw(msgspec.json.encode(self._allowed(value)))
        if first == b"[":
            items = [self._allowed_inside(item) for item in _RAW_ITEMS.decode(value)]
            return msgspec.Raw(msgspec.json.encode(items))
        return value


def refusal(field: str) -> RequestError:
    """Return the error for a client that sent a forbidden field."""
    return RequestError(400, f"{field} must not be sent by clients: only the gateway may set it", field)
