"""A real Envoy Gateway in front, with the chart's policies for it: what is proven behind the chart's Envoy.

GATEWAY_INSTALL names a program that installs Envoy Gateway and a GatewayClass into the kind cluster that its
last argument names. GATEWAY_CLASS and GATEWAY_NAMESPACE name the class and the namespace of the data plane.
GATEWAY_POOLS is set where it installs Envoy AI Gateway too, which adds InferencePools.
"""

from __future__ import annotations

import os
import shlex
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from urllib3 import PoolManager
from urllib3.util import parse_url

from kvroute.envoy_config import INFERENCE_PATHS
from tests.support.kind.cluster import NODE_PORTS, Cluster
from tests.support.kind.release import Release, base_values, merged
from tests.support.kind.tools import Kubectl, eventually, run
from tests.support.kind.traffic import MODEL, Answer, Conversation, Load, steady_load
from tests.support.router.paths import ADMINISTRATION, TRICKS, send

_PROGRAM = os.environ.get("GATEWAY_INSTALL", "")
pytestmark = [
    pytest.mark.kind,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not _PROGRAM, reason="GATEWAY_INSTALL: no program that installs Envoy Gateway"),
]

_CLASS = os.environ.get("GATEWAY_CLASS", "kvroute-test")
_DATA_PLANE = os.environ.get("GATEWAY_NAMESPACE", "envoy-gateway-system")
# A user reads an answer before the next question; the last block's event needs a few milliseconds.
_READS_S = 1.0
_CHAT = "/v1/chat/completions"


@pytest.fixture(
    scope="module",
    params=[
        "envoyGateway",
        pytest.param(
            "inferencePool",
            marks=pytest.mark.skipif(
                not os.environ.get("GATEWAY_POOLS"),
                reason="GATEWAY_POOLS: GATEWAY_INSTALL installs no Envoy AI Gateway",
            ),
        ),
    ],
)
def kind(request: pytest.FixtureRequest) -> str:
    """Return the value of the chart's gateway.kind."""
    param: str = request.param
    if param == "inferencePool":
        request.getfixturevalue("pools")
    return param


@pytest.fixture(scope="module")
def behind(cluster: Cluster, kind: str) -> Iterator[Release]:
    """Install the chart behind an Envoy Gateway, with two routers and two model servers."""
    run(*shlex.split(_PROGRAM), cluster.name)
    namespace = f"kvroute-{os.getpid()}-{kind.lower()}"
    release = Release(cluster, cluster.kubectl(namespace), NODE_PORTS[2])
    gateway = _Gateway(cluster.kubectl(f"{namespace}-gateways"), cluster.kubectl(_DATA_PLANE))
    try:
        gateway.start(release.node_port)
        release.install(_values(release, kind))
        yield release
    finally:
        gateway.stop()
        release.discard()


def test_picks_are_obeyed_from_the_first_answer(behind: Release, kind: str) -> None:
    """After `helm install --wait`, 16 turns are served where they were picked, cached as predicted."""
    eventually("an answer", lambda: not Conversation(behind.url).ask().failed)
    with ThreadPoolExecutor(2) as users:
        told = list(users.map(lambda _: _conversation(behind.url), range(4)))
    for answers in told:
        assert [answer.error for answer in answers if answer.failed] == []
        assert all(answer.cached_tokens > 500 for answer in answers[1:])
        assert len({answer.pod for answer in answers}) == 1
    seen = [answer for answers in told for answer in answers]
    if kind == "envoyGateway":
        for answer in seen:
            decision = behind.decision(answer.request_id)
            assert decision["pod"] == answer.pod
            cached = decision["predicted_cached_tokens"], decision["delivered_cached_tokens"]
            assert cached == (answer.cached_tokens, answer.cached_tokens)
    pages = [behind.page(router, "/debug/decisions?n=100") for router in behind.names("router")]
    decided = Counter(
        (one["prompt_tokens"], one["predicted_cached_tokens"], one["delivered_cached_tokens"])
        for page in pages
        for one in page["decisions"]
    )
    # Responses by way of an InferencePool name neither their pod nor their request.
    assert not Counter((one.prompt_tokens, one.cached_tokens, one.cached_tokens) for one in seen) - decided


def test_only_inference_paths_pass(behind: Release, kind: str) -> None:
    """No spelling of an administration path is answered with 200; inference paths reach the router."""
    address = parse_url(behind.url)
    assert address.host is not None
    assert address.port is not None
    where = address.host, address.port
    # Envoy AI Gateway calls the router for requests without a route too: 400 is the router's.
    rejected = {404, 405} if kind == "envoyGateway" else {400, 404, 405}
    for method, path in ADMINISTRATION:
        assert send(where, method.encode(), path.encode())[0] in rejected, (method, path)
    for target in TRICKS:
        for method in (b"GET", b"POST"):
            assert send(where, method, target)[0] != 200, (method, target)
    for method, path in INFERENCE_PATHS:
        # Their bodies are empty objects, which the router or an engine rejects.
        assert send(where, method.encode(), path.encode())[0] in (200, 400, 404, 501), (method, path)


def test_a_killed_router_fails_only_what_was_inside_it(behind: Release) -> None:
    """Of two routers one is killed under load: requests that begin a second later or more all succeed."""
    behind.await_settled(routers=2, model_servers=2)
    with steady_load(behind.url, think_s=0.05) as load:
        _await_answers(load, 40)
        router = behind.pods("router")[0]
        behind.cluster.kill_container(router["status"]["containerStatuses"][0]["containerID"])
        killed_s = time.monotonic()
        _await_answers(load, len(load.answers) + 60)
        behind.await_settled(routers=2, model_servers=2)
    failed = [answer for answer in load.answers if answer.failed]
    assert len(failed) <= 4, failed
    assert [answer for answer in failed if answer.started_s > killed_s + 1.0] == []


def test_a_rolling_upgrade_fails_no_request(behind: Release, kind: str) -> None:
    """A rolling upgrade of every router and model server under load fails no request."""
    behind.await_settled(routers=2, model_servers=2)
    before = {*behind.names("router"), *behind.names("model-server")}
    rolled = {"podAnnotations": {"kvroute.dev/rolled": str(time.time_ns())}}
    with steady_load(behind.url) as load:
        _await_answers(load, 20)
        behind.install(merged(_values(behind, kind), {"router": rolled, "modelServers": rolled}))
        behind.await_settled(routers=2, model_servers=2)
        _await_answers(load, len(load.answers) + 20)
    assert not before & {*behind.names("router"), *behind.names("model-server")}
    load.assert_none_failed()


@pytest.fixture
def further_pool(behind: Release, kind: str) -> Iterator[str]:
    """Add an InferencePool of one model server, at a port of its own of the same routers; yield its name."""
    if kind == "envoyGateway":
        pytest.skip("Envoy Gateway alone has no InferencePools")
    name, port = "second", 9012
    picker = {"kind": "Service", "name": "kvroute-epp", "port": {"number": port}}
    parent = {"name": _Gateway.name, "namespace": f"{behind.kubectl.namespace}-gateways"}
    rule = {
        # An exact path takes precedence over the main route's expression.
        "matches": [
            {"path": {"type": "Exact", "value": _CHAT}, "headers": [{"name": "pool", "value": name}]}
        ],
        "backendRefs": [{"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": name}],
    }
    behind.kubectl.apply(
        {
            "apiVersion": "inference.networking.k8s.io/v1",
            "kind": "InferencePool",
            "metadata": {"name": name},
            "spec": {
                "selector": {"matchLabels": {"kvroute.dev/model-servers": name}},
                "targetPorts": [{"number": 8000}],
                "endpointPickerRef": picker,
            },
        },
        {
            "apiVersion": "gateway.networking.k8s.io/v1",
            "kind": "HTTPRoute",
            "metadata": {"name": name},
            "spec": {"parentRefs": [parent], "rules": [rule]},
        },
    )
    more = {
        "moreModelServers": {name: {"model": {"name": name}, "replicas": 1}},
        "gateway": {"inferencePool": {"more": [{"name": name, "port": port}]}},
    }
    try:
        behind.install(merged(_values(behind, kind), more))
        behind.await_settled(routers=2, model_servers=3)
        yield name
    finally:
        behind.kubectl("delete", f"httproute/{name}", f"inferencepool/{name}")
        behind.install(_values(behind, kind))
        behind.await_settled(routers=2, model_servers=2)


def test_a_further_pool_has_a_port_of_its_own(behind: Release, further_pool: str) -> None:
    """Requests for a second InferencePool get only its pods, which the first one selects too."""
    its_own, another = (
        Conversation(behind.url, model=model, pool=PoolManager(headers={"pool": further_pool}, retries=False))
        for model in (further_pool, MODEL)
    )
    eventually("an answer", lambda: not its_own.ask().failed)
    time.sleep(_READS_S)
    assert its_own.ask().cached_tokens > 500
    assert another.ask().status == 404
    assert not Conversation(behind.url).ask().failed


class _Gateway:
    """A Gateway in a namespace of its own, open at a node port.

    Attributes:
        kubectl: kubectl for the Gateway's namespace.
        data_plane: kubectl for the namespace of its Envoy.
    """

    name = "inference"

    def __init__(self, kubectl: Kubectl, data_plane: Kubectl) -> None:
        self.kubectl = kubectl
        self.data_plane = data_plane

    def start(self, node_port: int) -> None:
        """Create the Gateway and wait until it is Programmed."""
        self.kubectl("create", "namespace", self.kubectl.namespace)
        listener = {"name": "http", "port": 80, "protocol": "HTTP"}
        listener |= {"allowedRoutes": {"namespaces": {"from": "All"}}}
        self.kubectl.apply(
            {
                "apiVersion": "gateway.networking.k8s.io/v1",
                "kind": "Gateway",
                "metadata": {"name": self.name},
                "spec": {"gatewayClassName": _CLASS, "listeners": [listener]},
            }
        )
        owner = "gateway.envoyproxy.io/owning-gateway"
        labels = {f"{owner}-namespace": self.kubectl.namespace, f"{owner}-name": self.name}
        # Listeners below 1024 have a container port that is 10000 more.
        port = {"port": 80, "targetPort": 10080, "nodePort": node_port}
        self.data_plane.apply(
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": "gateway-of-tests"},
                "spec": {"type": "NodePort", "selector": labels, "ports": [port]},
            }
        )
        self.kubectl("wait", "--for=condition=Programmed", f"gateway/{self.name}", "--timeout=180s")

    def stop(self) -> None:
        """Free the node port and delete the Gateway."""
        self.data_plane("delete", "service", "gateway-of-tests", "--ignore-not-found")
        self.kubectl("delete", "namespace", self.kubectl.namespace, "--ignore-not-found", "--wait=false")


def _values(release: Release, kind: str) -> dict[str, Any]:
    namespace = release.kubectl.namespace
    parent = {"name": _Gateway.name, "namespace": f"{namespace}-gateways"}
    gateway = {
        "kind": kind,
        "envoyGateway": {"namespace": _DATA_PLANE},
        "httpRoute": {"parentRefs": [parent], "oneMatch": kind == "inferencePool"},
    }
    data_plane = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": _DATA_PLANE}}}
    admitted = {"networkPolicy": {"gateways": [data_plane]}} if kind == "inferencePool" else {}
    return merged(base_values(namespace), {"mode": "gateway", "gateway": gateway, **admitted})


def _conversation(url: str) -> list[Answer]:
    conversation, answers = Conversation(url, sentences=60), []
    for _ in range(4):
        answers.append(conversation.ask())
        time.sleep(_READS_S)
    return answers


def _await_answers(load: Load, count: int) -> None:
    eventually(f"{count} requests were answered", lambda: len(load.answers) >= count)
