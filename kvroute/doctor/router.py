"""Checks of one router: whether it answers at all, and its own findings with their remedies."""

from __future__ import annotations

from typing import Any

import grpc
import msgspec
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvroute.doctor.engine import BLOCK_TOKENS
from kvroute.doctor.findings import Report
from kvroute.engines import Engine
from kvroute.http_client import FIELDS, Http, UnreachableError

_ANSWER_S = 2.0
# Check and case of the findings of /ready.
_READY = {
    "parity": ("tokens", "known"),
    "drafters": ("drafter", "known"),
    "pods_asleep": ("asleep", "sleeps"),
    "pods_failing": ("pods", "failing"),
    "picks_ignored": ("picks", "known"),
    "prefixes_of_old_weights_may_hit": ("adapters", "old_weights"),
    "waits_for": ("pods", "waits"),
    "views_pending": ("view", "pending"),
}


class Pods(msgspec.Struct):
    """The page /debug/pods."""

    pods: list[Engine] = []
    block_tokens: int = BLOCK_TOKENS


_PODS = msgspec.json.Decoder(Pods)


def check_router(url: str, grpc_address: str | None, http: Http, report: Report) -> Pods:
    """Check a router by its metrics port; return its pods, none if they cannot be read."""
    _check_grpc(grpc_address, report)
    try:
        answer = http.ask(f"{url}/ready", read_s=_ANSWER_S)
        ready = answer.read(FIELDS)
        if "status" not in ready:
            report.add("router", "stranger", why=answer.text)
            return Pods()
        report.add("router", "ready" if answer.status == 200 else "not_ready", why=ready["status"])
        report.judge_clock(answer.headers.get("date"))
        _show_ready(ready, report)
        answer = http.ask(f"{url}/debug/pods", read_s=_ANSWER_S)
    except UnreachableError as error:
        report.add("router", "hung" if error.is_hung else "refused", why=error)
        return Pods()
    found = answer.read(_PODS)
    if not found.pods:
        report.add("pods", "not_allowed" if answer.status in (401, 403) else "none", why=answer.text)
    for pod in found.pods:
        which = f"{pod.name} ({pod.address})"
        if pod.ready:
            state = pod.view or "not followed"
            report.add("view", "exact" if state == "EXACT" else "other", what=f"{which}: {state}")
        else:
            report.add("pods", "not_ready", which=which, why=pod.why_not)
    return found


def _check_grpc(address: str | None, report: Report) -> None:
    """Ask the gRPC health service, by which Envoy trusts a router."""
    if address is None:
        report.add("grpc", "not_asked")
        return
    with grpc.insecure_channel(address) as channel:
        try:
            request = health_pb2.HealthCheckRequest()
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=_ANSWER_S)
        except grpc.RpcError as error:
            is_hung = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            report.add("grpc", "hung" if is_hung else "refused", address=address, why=error.code().name)
            return
    serves = answer.status == health_pb2.HealthCheckResponse.SERVING
    report.add("grpc", "serves" if serves else "not_serving", address=address)


def _show_ready(ready: dict[str, Any], report: Report) -> None:
    for name, (check, case) in _READY.items():
        found = ready.get(name)
        for each in [found] if isinstance(found, str) else found or ():
            what = f"{each}: {found[each]}" if isinstance(found, dict) else each
            report.add(check, case, what=what, model="MODEL")
    for text in ready.get("engines", ()):
        # "pod (address): fault: remedy", whose remedy may contain further colons.
        *what, remedy = text.split(": ", 2)
        report.add("engine", "fault", what=": ".join(what), remedy=remedy)
    for model, state in ready.get("rendered_by_pods", {}).items():
        if state.get("error"):
            report.add("tokens", "not_rendered", model=model, why=state["error"])
