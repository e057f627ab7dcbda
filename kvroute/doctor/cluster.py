"""Checks in Kubernetes: rights, pools and their pods, and the Events that routers post."""

from __future__ import annotations

import os
from typing import Any

from kvroute.doctor.findings import Report
from router.config.kube import LLMD_GROUP, POOL_GROUP, POOL_VERSIONS

# Group and resource that a router with a pool lists and watches.
_RESOURCES = (
    ("", "pods"),
    (POOL_GROUP, "inferencepools"),
    (LLMD_GROUP, "inferenceobjectives"),
    (LLMD_GROUP, "inferencemodelrewrites"),
)
_COMPONENT = "kvroute-router"
_LIMITS = {"limit": 500, "_request_timeout": 10}


def check_cluster(namespace: str, report: Report) -> None:
    """Check a namespace with the credentials of the pod, else of the kubeconfig."""
    # Takes a second to import, and has no types.
    import kubernetes
    from urllib3.exceptions import HTTPError

    api: Any = kubernetes.client
    config: Any = kubernetes.config
    try:
        if "KUBERNETES_SERVICE_HOST" in os.environ:
            config.load_incluster_config()
        else:
            config.load_kube_config(os.environ.get("KUBECONFIG"))
        _check_rights(api, namespace, report)
        _check_pools(api, namespace, report)
        events = api.CoreV1Api().list_namespaced_event(
            namespace, field_selector=f"source={_COMPONENT}", **_LIMITS
        )
    except api.ApiException as error:
        case = "no_crd" if error.status == 404 else "denied"
        report.add("cluster", case, why=f"{error.status} {error.reason}")
        return
    except (config.ConfigException, HTTPError, OSError) as error:
        report.add("cluster", "refused", why=error)
        return
    for event in events.items:
        report.add("event", "posted", reason=event.reason, message=event.message)
    if not events.items:
        report.add("event", "none")


def _check_rights(api: Any, namespace: str, report: Report) -> None:
    denied = []
    for group, resource in _RESOURCES:
        for verb in ("list", "watch"):
            wanted = {"namespace": namespace, "verb": verb, "group": group, "resource": resource}
            review = api.AuthorizationV1Api().create_self_subject_access_review(
                {"spec": {"resourceAttributes": wanted}}
            )
            if not review.status.allowed:
                denied.append(f"{verb} {resource}{group and f'.{group}'}")
    verbs = ", ".join(denied)
    report.add("rbac", "denied" if denied else "allowed", verbs=verbs, namespace=namespace)


def _check_pools(api: Any, namespace: str, report: Report) -> None:
    pools = api.CustomObjectsApi().list_namespaced_custom_object(
        POOL_GROUP, POOL_VERSIONS[POOL_GROUP], namespace, "inferencepools", **_LIMITS
    )["items"]
    if not pools:
        report.add("pool", "none")
    for pool in pools:
        labels = pool["spec"]["selector"]["matchLabels"]
        selector = ",".join(f"{key}={value}" for key, value in labels.items())
        pods = api.CoreV1Api().list_namespaced_pod(namespace, label_selector=selector, **_LIMITS).items
        conditions = [one for pod in pods for one in pod.status.conditions or () if one.type == "Ready"]
        ready = sum(one.status == "True" for one in conditions)
        case = "ready" if ready else "not_ready" if pods else "no_pods"
        name = pool["metadata"]["name"]
        report.add("pool", case, pool=name, count=len(pods), selector=selector, ready=ready)
