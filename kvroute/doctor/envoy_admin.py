"""Checks of a running Envoy's modes, read from its administration port."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvroute.doctor.findings import Report
from kvroute.http_client import FIELDS, Http, UnreachableError

_WHOLE_BODIES = ("FULL_DUPLEX_STREAMED", "BUFFERED")


def check_envoy(url: str, http: Http, report: Report) -> None:
    """Judge how Envoy calls routers: failure mode, bodies, and whether a cluster follows the pick."""
    try:
        configs = list(_typed(http.ask(f"{url}/config_dump").read(FIELDS)))
    except UnreachableError as error:
        report.add("envoy", "refused", why=error)
        return
    doors = [one for one in configs if one["@type"].endswith((".ExtAuthz", ".ExternalProcessor"))]
    if not doors:
        report.add("envoy", "no_door")
    for door in doors:
        is_authz, opens = door["@type"].endswith(".ExtAuthz"), bool(door.get("failure_mode_allow"))
        body, modes = door.get("with_request_body") or {}, door.get("processing_mode") or {}
        is_whole = modes.get("request_body_mode") in _WHOLE_BODIES
        if is_authz:
            is_whole = bool(body) and not body.get("allow_partial_message")
        case = "no_bodies" if not is_whole else "open" if opens and not is_authz else "whole"
        mode = "open: requests go unrouted" if opens else "closed: requests fail"
        report.add("envoy", case, door="ext_authz" if is_authz else "ext_proc", mode=mode)
    if not any("use_http_header" in str(one) or "override_host" in str(one) for one in configs):
        report.add("envoy", "no_cluster")


def _typed(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the typed objects of a configuration dump; its parser has bounded the depth."""
    if isinstance(value, dict) and isinstance(value.get("@type"), str):
        yield value
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _typed(each)
