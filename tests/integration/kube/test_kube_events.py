"""Kubernetes Events against a real API server: repetition, and posting while others fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from router.errors import ClusterError
from router.pods.kube.client import KubeClient
from router.pods.kube.problems import EventPoster, Reason
from tests.support.kube.cluster_objects import Namespace, eventually


class FailingClient(KubeClient):
    """Client whose posts of one reason fail while `fails` is set."""

    fails: Reason | None = None

    def post_event(self, namespace: str, event: dict[str, Any]) -> None:
        """Post the Event or fail."""
        if event["reason"] == self.fails:
            raise ClusterError(500, "events: 500 the server is not well")
        super().post_event(namespace, event)


@contextmanager
def posting(namespace: Namespace, client: KubeClient) -> Iterator[EventPoster]:
    """Started poster of Events about a pod of the namespace."""
    epp = {"apiVersion": "v1", "kind": "Pod", "namespace": namespace.name, "name": "epp", "uid": "uid-1"}
    poster = EventPoster(client, lambda: epp)
    poster.start()
    try:
        yield poster
    finally:
        poster.close()


def counts(namespace: Namespace) -> dict[tuple[str, str], int]:
    """Return the counts of the namespace's Events by reason and message."""
    return {(event["reason"], event["message"]): event["count"] for event in namespace.events()}


def posted(namespace: Namespace, reason: Reason, message: str, count: int) -> None:
    """Wait until an Event has this count."""
    eventually(lambda: counts(namespace).get((reason, message)) == count, f"{reason} {message} {count} times")


def test_a_repeated_event_raises_its_count(namespace: Namespace) -> None:
    """A repeated message is one Event with an increasing count, also after a restart of the router."""
    with posting(namespace, KubeClient(namespace.server.kubeconfig)) as poster:
        for count in (1, 2, 3):
            poster.post(Reason.BAD_POD, "one: x")
            posted(namespace, Reason.BAD_POD, "one: x", count)
        poster.post(Reason.FORBIDDEN, "pods")
        posted(namespace, Reason.FORBIDDEN, "pods", 1)
    with posting(namespace, KubeClient(namespace.server.kubeconfig)) as poster:
        poster.post(Reason.BAD_POD, "one: x")
        posted(namespace, Reason.BAD_POD, "one: x", 4)
    assert len(namespace.events()) == 2


def test_a_failed_post_does_not_block_others(namespace: Namespace) -> None:
    """While posts of one reason fail, others succeed; the failed one is retried."""
    client = FailingClient(namespace.server.kubeconfig)
    client.fails = Reason.BAD_POD
    with posting(namespace, client) as poster:
        poster.post(Reason.BAD_POD, "one: x")
        for count in (1, 2):
            poster.post(Reason.FORBIDDEN, "pods")
            posted(namespace, Reason.FORBIDDEN, "pods", count)
        client.fails = None
        posted(namespace, Reason.BAD_POD, "one: x", 1)


def test_create_and_patch_suffice_to_count_events(namespace: Namespace) -> None:
    """The rights that the chart grants suffice to increase an Event's count."""
    namespace.account()
    namespace.grant()
    token = namespace.server.token(namespace.name, "router", lives_s=3600.0)
    file = namespace.server.directory / f"{namespace.name}.kubeconfig"
    client = KubeClient(namespace.server.write_kubeconfig(file, {"token": token}))
    with posting(namespace, client) as poster:
        for count in (1, 2):
            poster.post(Reason.BAD_POD, "one: x")
            posted(namespace, Reason.BAD_POD, "one: x", count)
