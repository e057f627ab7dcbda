"""Body fields that only gateways may send to a model server: bodies in, forbidden fields found or removed.

KV transfer parameters name hosts, engines and blocks. From a client they end an engine, poison its cache or
read what other users asked. Knows no gateway's messages and no pods.
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
"""Fields that are forbidden unless the configuration names others."""

# Objects from which engines take further parameters.
_CONTAINERS = frozenset({"vllm_xargs", "sampling_params", "extra_args", "extra_body", "nvext"})
_RAW_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_RAW_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])
# Forms carry fields that no JSON reader sees.
_FORMS = ("multipart/", "application/x-www-form-urlencoded")


class BodyGuard:
    """Finds and removes the fields that clients must not send. Safe to share between threads.

    A field is forbidden at the top level of a JSON object and inside the objects that carry extra parameters
    (`vllm_xargs`, `sampling_params`, `extra_args`, `extra_body`, `nvext`). A field that is null is absent.

    Args:
        names: Names of the forbidden fields; empty: nothing is checked.
        has_connector: Whether engines of the pool have a KV connector. Bodies that cannot be checked are
            then refused.
    """

    def __init__(
        self,
        names: Collection[str] = GATEWAY_ONLY_FIELDS,
        has_connector: Callable[[], bool] = lambda: False,
    ) -> None:
        self._names = frozenset(names)
        self._suspects = self._names | _CONTAINERS if names else frozenset()
        self._has_connector = has_connector

    def forbidden(self, request: RouteRequest, body: bytes | bytearray) -> str | None:
        """Return the path of a forbidden field, such as `vllm_xargs.kv_hints`; None if there is none.

        Args:
            request: Made of `body`; its own `body` is empty where the router does not know the API.

        Raises:
            RequestError: 400, the body cannot be checked and must not pass unchecked, or it is JSON of a
                form from which no field can be removed.
        """
        if not self._suspects or not body:
            return None
        try:
            fields = request.body or self._decoded(body, request.headers)
            return None if self._suspects.isdisjoint(fields) else self._first(fields)
        except RecursionError as error:
            raise RequestError(400, "the request body is nested too deeply") from error

    def unchecked(self) -> None:
        """Let a request pass whose body the router cannot read.

        Raises:
            RequestError: 400, the pool's engines have a KV connector.
        """
        if self._suspects and self._has_connector():
            raise RequestError(
                400,
                "the request body cannot be checked for fields that only the gateway may send: send a JSON "
                "object, whole and not larger than the gateway reads",
            )

    def without(self, body: bytes | bytearray) -> bytes:
        """Return a JSON object without its forbidden fields; other values stay as they are written."""
        return msgspec.json.encode(self._allowed(body))

    def _decoded(self, body: bytes | bytearray, headers: Mapping[str, str]) -> Mapping[str, Any]:
        """Return the suspect fields of a body whose API the router does not know."""
        if headers.get("content-type", "").lower().startswith(_FORMS):
            self.unchecked()
        try:
            fields = _RAW_FIELDS.decode(body)
            return {name: msgspec.json.decode(fields[name]) for name in self._suspects.intersection(fields)}
        except ValueError:
            return self._leniently_decoded(body)

    def _leniently_decoded(self, body: bytes | bytearray) -> Mapping[str, Any]:
        """Check what Python's JSON reader takes beyond the standard: a BOM, UTF-16, NaN.

        Engines read bodies with it.
        """
        try:
            fields = json.loads(body)
        except ValueError:
            self.unchecked()
            return {}
        if isinstance(fields, dict) and (field := self._first(fields)) is not None:
            raise refusal(field)
        return {}

    def _first(self, fields: Mapping[str, Any]) -> str | None:
        for name in fields:
            value = fields[name]
            if name in self._names and value is not None:
                return name
            if name in _CONTAINERS:
                for inner in value if isinstance(value, list) else (value,):
                    if isinstance(inner, dict) and (found := self._first(inner)) is not None:
                        return f"{name}.{found}"
        return None

    def _allowed(self, body: bytes | bytearray | msgspec.Raw) -> dict[str, msgspec.Raw]:
        fields = _RAW_FIELDS.decode(body)
        for name in self._suspects.intersection(fields):
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
    """Return the answer to a client that sent a forbidden field."""
    return RequestError(400, f"{field} must not be sent by clients: only the gateway may set it", field)
