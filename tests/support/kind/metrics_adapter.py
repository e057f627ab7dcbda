"""An adapter of the external metrics API that serves one gauge of a release's routers."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tests.support.kind.images import ROUTER
from tests.support.kind.tools import Kubectl, eventually

GROUP = "external.metrics.k8s.io"
_API = f"v1beta1.{GROUP}"
_NAME = "metrics-adapter"
_PORT = 6443
# Before a Service is routed, a server outside may answer at its address; the API server would keep that
# connection.
_IS_ROUTED = """
import ssl, sys, urllib.request
context = ssl._create_unverified_context()
print(urllib.request.urlopen(sys.argv[1], context=context, timeout=2).status)
"""
_SERVER = Path(__file__).with_name("metrics_adapter_server.py").read_text()


def start_adapter(kubectl: Kubectl, url: str) -> None:
    """Start the adapter in a namespace and register it; wait until the API server reaches it.

    Args:
        url: URL of a router's metrics.
    """
    labels = {"app": _NAME}
    container = {
        "name": _NAME,
        "image": ROUTER,
        "imagePullPolicy": "Never",
        "command": ["python", "-c", _SERVER, url, str(_PORT)],
    }
    kubectl.apply(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": _NAME, "labels": labels},
            "spec": {"containers": [container], "terminationGracePeriodSeconds": 0},
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": _NAME},
            "spec": {"selector": labels, "ports": [{"port": 443, "targetPort": _PORT}]},
        },
    )
    kubectl("wait", "--for=condition=Ready", f"pod/{_NAME}", "--timeout=300s")
    page = f"https://{_NAME}.{kubectl.namespace}.svc/apis/{GROUP}/v1beta1"
    routed = partial(kubectl, "exec", _NAME, "--", "python", "-c", _IS_ROUTED, page)
    eventually("the adapter's Service is routed", lambda: routed().strip() == "200")
    kubectl.apply(
        {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": _API},
            "spec": {
                "group": GROUP,
                "version": "v1beta1",
                "groupPriorityMinimum": 100,
                "versionPriority": 100,
                "insecureSkipTLSVerify": True,
                "service": {"name": _NAME, "namespace": kubectl.namespace},
            },
        },
    )
    kubectl("wait", "--for=condition=Available", f"apiservice/{_API}", "--timeout=300s")


def stop_adapter(kubectl: Kubectl) -> None:
    """Remove the registration, which would make discovery fail without the adapter."""
    kubectl("delete", "apiservice", _API, "--ignore-not-found")
