"""What the local stack asks its own processes over HTTP: a plan in, states and explanations out.

Knows the router's debug pages and the model servers' cache reset; knows nothing of processes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import urllib3

from router.local.stack import LocalStackError, StackPlan

_TIMEOUT_S = 10.0
_POLL_S = 0.05
_PUBLISHED = "kvroute_kv_event_batches_published_total"
_RECEIVED = "llm_d_epp_kv_cache_events_messages_received_total"


def await_pods(plan: StackPlan, check: Callable[[], None], *, deadline_s: float = 120.0) -> None:
    """Waits until the router takes every pod for ready and follows its events without doubt.

    Raises:
        LocalStackError: A pod is not ready in time; the message holds the router's reason.
    """
    end_s = time.monotonic() + deadline_s
    while waiting := [
        pod
        for pod in _json("GET", f"{plan.router_debug_url}/debug/pods")["pods"]
        if not (pod["ready"] and pod["view"] == "EXACT")
    ]:
        check()  # raises when a process of the stack has died
        if time.monotonic() > end_s:
            pod = waiting[0]
            raise LocalStackError(
                f"the router does not use {pod['address']}: {pod['why_not'] or pod['view']}"
            )
        time.sleep(_POLL_S)


def decision(plan: StackPlan, request_id: str) -> dict[str, Any]:
    """The router's explanation of one pick.

    Raises:
        LocalStackError: The router knows no such request.
    """
    answer = _json("GET", f"{plan.router_debug_url}/debug/decisions?request_id={request_id}")
    if not answer["decisions"]:
        raise LocalStackError(f"the router has no record of request {request_id}")
    found: dict[str, Any] = answer["decisions"][0]
    return found


def await_events(plan: StackPlan) -> None:
    """Waits until the router has received as much as the pods have published since the start of all.

    After some seconds it waits no more: what was lost and replayed is not counted as received.
    """
    end_s = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < end_s:
        published = sum(_sum(url, _PUBLISHED) for url in plan.pod_urls.values())
        if _sum(plan.router_debug_url, _RECEIVED) >= published:
            return
        time.sleep(_POLL_S)


def empty_caches(plan: StackPlan) -> None:
    """Makes every pod forget its cached blocks; one whose last request has just ended may need a moment.

    Raises:
        LocalStackError: A pod still runs requests after some seconds.
    """
    end_s = time.monotonic() + _TIMEOUT_S
    for url in plan.admin_urls:
        while not _json("POST", f"{url}/reset_prefix_cache").get("success"):
            if time.monotonic() > end_s:
                raise LocalStackError(f"{url} does not empty its cache: requests are still running there")
            time.sleep(_POLL_S)


def _sum(url: str, metric: str) -> float:
    """The sum of a metric's series on a page."""
    lines = _answer("GET", f"{url}/metrics").decode().splitlines()
    return sum(
        float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{metric} ", f"{metric}{{"))
    )


def _json(method: str, url: str) -> dict[str, Any]:
    try:
        value = json.loads(_answer(method, url))
    except ValueError as error:
        raise LocalStackError(f"{url}: {error}") from error
    if not isinstance(value, dict):
        raise LocalStackError(f"{url} answered {str(value)[:200]}")
    return value


def _answer(method: str, url: str) -> bytes:
    try:
        response = urllib3.request(method, url, timeout=_TIMEOUT_S, retries=False)
    except urllib3.exceptions.HTTPError as error:
        raise LocalStackError(f"{url}: {error}") from error
    if response.status != 200:
        raise LocalStackError(f"{url} answered {response.status}: {response.data[:200]!r}")
    return response.data
