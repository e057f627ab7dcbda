"""One router for several InferencePools of a real API server, each at a port of its own."""

from __future__ import annotations

import json
from contextlib import closing

import grpc
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as pb_grpc

from router.app.server import RouterServer
from tests.support.kube.cluster_objects import POOL, Namespace, Picker, eventually, kube_router
from tests.support.router.doors import Stream, body, headers, streamed_bytes
from tests.support.router.server import get

OTHER, OTHER_PORT = "other", "grpc-other"
OTHER_SELECTOR = {"app": "other"}


def served_model(router: RouterServer, port: str, model: str) -> str:
    """Return the model of a request after ext_proc at a port; "" if the request is rejected."""
    with grpc.insecure_channel(f"127.0.0.1:{router.ports[port]}") as channel:
        stream = Stream(pb_grpc.ExternalProcessorStub(channel))
        stream.send(headers(path="/v1/completions"))
        stream.send(body(json.dumps({"model": model, "prompt": "hello"}).encode()))
        answer = stream.receive()
        if answer.HasField("immediate_response"):
            return ""
        sent, _ = streamed_bytes([stream.receive()])
        stream.cancel()
    return str(json.loads(sent)["model"])


def test_each_port_picks_pods_of_its_pool(namespace: Namespace) -> None:
    """Requests at a pool's port go to its pods alone, even if only another pool serves the model."""
    namespace.pool()
    namespace.pool(OTHER, selector=OTHER_SELECTOR)
    one, two = namespace.pod("one"), namespace.pod("two", labels=OTHER_SELECTOR)
    two.models.append(("second", None))
    config = namespace.config(more_pools=((OTHER, 0),))
    with (
        kube_router(config) as router,
        closing(Picker(router)) as picker,
        closing(Picker(router, OTHER_PORT)) as other,
    ):
        eventually(lambda: (picker.pick(), other.pick()) == (one.address, two.address), "both are picked")
        assert (picker.picks(), other.picks()) == ({one.address}, {two.address})
        assert other.pick(model="second") == two.address
        with closing(Picker(router)) as again:
            assert "does not exist" in again.refusal(model="second")
        assert picker.pick(candidates=[two.address]) == ""
        namespace.delete_pool(OTHER)
        eventually(lambda: other.pick() == "", "the other pool's pods are forgotten")
        assert picker.pick() == one.address
        shown = json.loads(get(router, "/debug/discovery")[1])
        assert {name: pool["pool"]["found"] for name, pool in shown["pools"].items()} == {
            POOL: True,
            OTHER: False,
        }
        page = get(router, "/metrics")[1].decode()
        assert f'kvroute_discovery_objects{{kind="pods",pool="{POOL}"}} 1.0' in page
        namespace.pool(OTHER, selector=OTHER_SELECTOR)
        eventually(lambda: other.pick() == two.address, "the other pool is back")


def test_each_pool_has_rewrites_of_its_own(namespace: Namespace) -> None:
    """A rewrite applies at the port of its pool alone."""
    namespace.pool()
    namespace.pool(OTHER, selector=OTHER_SELECTOR)
    namespace.pod("one")
    namespace.pod("two", labels=OTHER_SELECTOR)
    namespace.rewrite("theirs", "alias", "kvroute-tiny", pool=OTHER)
    with kube_router(namespace.config(more_pools=((OTHER, 0),)), compat="answers") as router:
        eventually(lambda: served_model(router, OTHER_PORT, "alias") == "kvroute-tiny", "rewritten")
        assert served_model(router, "grpc", "alias") == ""
        assert served_model(router, "grpc", "kvroute-tiny") == "kvroute-tiny"
