"""Detection of engines that have queued requests and compute nothing, while others compute."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from router.pods.pod_set import Pod

STALL_S = 30.0
"""Seconds without any progress after which an engine with queued requests is stalled."""


def checked(pod: Pod, pods: Iterable[Pod]) -> Pod:
    """Return a probed pod with its progress, and not ready while it is stalled.

    A chunk of a long prefill changes the use of the KV cache, but no counter. A stalled pod stays a candidate
    where no pod is ready.

    Args:
        pods: All pods; one of the same model must have made progress lately.
    """
    load = pod.load
    if load is None or load.tokens is None:
        return pod
    now_s, progress = load.scraped_s, (load.tokens, load.kv_usage, load.running)
    if progress != pod.progress:
        moved_s = now_s if pod.progress else pod.moved_s
        pod = replace(pod, progress=progress, moved_s=moved_s, stuck_s=now_s, stalled=False)
    if pod.asleep or not load.waiting:
        pod = replace(pod, stuck_s=now_s, stalled=False)
    if not pod.stalled and now_s - pod.stuck_s >= STALL_S:
        others = (other for other in pods if other.address != pod.address and other.ready)
        goes_on = any(other.moved_s > now_s - STALL_S and _same_model(pod, other) for other in others)
        pod = replace(pod, stalled=goes_on)
    if not (pod.stalled and pod.ready):
        return pod
    return replace(pod, ready=False, silent=True, why=f"stalled: requests wait, no token for {STALL_S:g} s")


def _same_model(pod: Pod, other: Pod) -> bool:
    return pod.models is not None and other.models is not None and pod.models.base == other.models.base
