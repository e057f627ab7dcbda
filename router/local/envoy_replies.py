"""Envoy's own replies in OpenAI's error form."""

from __future__ import annotations

import json
from typing import Any

DOOR_FAILED = ("LoopDetected", 508)
"""The status, by Envoy's name and by number, that a filter answers when no router does.

`reply_mappers` makes it a 503. Another status tells the mapper that the 503 is not the router's own answer.
"""

# Envoy's flags for a pod that was lost: no connection, connection ended, request reset.
_POD_LOST_FLAGS = ("UF", "UC", "UR")


def reply_mappers() -> list[dict[str, Any]]:
    """Return the mappers of local replies; the first that matches a reply counts."""
    no_router = _in_openai_form(
        _is_status(DOOR_FAILED[1]), 503, "ServiceUnavailableError", "no router answers this gateway"
    )
    too_large = _in_openai_form(
        _is_status(413),
        413,
        "RequestEntityTooLargeError",
        "the request body is larger than this gateway's limit",
    )
    pod_lost = _in_openai_form(
        {"response_flag_filter": {"flags": list(_POD_LOST_FLAGS)}},
        503,
        "ServiceUnavailableError",
        "the model server was lost before its response began; it may have begun the request, so no other "
        "one was asked",
    )
    return [{**no_router, "status_code": 503}, too_large, pod_lost]


def openai_error(status: int, type_name: str, message: str) -> str:
    """Return an error body in OpenAI's form."""
    return json.dumps(_error(status, type_name, message))


def _in_openai_form(matching: dict[str, Any], status: int, type_name: str, message: str) -> dict[str, Any]:
    return {
        "filter": matching,
        "body_format_override": {"json_format": _error(status, type_name, message)},
    }


def _error(status: int, type_name: str, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": type_name, "param": None, "code": status}}


def _is_status(status: int) -> dict[str, Any]:
    value = {"default_value": status, "runtime_key": "unused"}
    return {"status_code_filter": {"comparison": {"op": "EQ", "value": value}}}
