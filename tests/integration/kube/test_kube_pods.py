"""A whole router that finds its pods through a real API server: who is picked, and who is not any more."""

from __future__ import annotations

import json
from contextlib import closing

import numpy as np

from router.app.server import RouterServer
from tests.integration.kube.kube_support import Namespace, Picker, eventually_picked, kube_router
from tests.integration.router_server_support import FakePod, get
from tests.wire.engine_publisher import EnginePublisher, stored
from tests.wire.router_wire_support import wait_until

BLOCK_TOKENS = 16
TOKENS = list(range(1000, 1000 + 4 * BLOCK_TOKENS))


def declared(router: RouterServer) -> set[tuple[str, str]]:
    """Name and address of all endpoints that are known."""
    return {(pod.name, pod.address) for pod in router.pods.snapshot().values()}


def test_ready_pods_of_the_pool_are_picked_and_others_are_not(namespace: Namespace) -> None:
    """A pod is picked once it is Ready; one that stops being Ready, ends or is deleted is out."""
    namespace.pool()
    one, two = namespace.pod("one"), namespace.pod("two", ready=False)
    with kube_router(namespace.config()) as router, closing(Picker(router)) as picker:
        eventually_picked(picker, one.address)
        namespace.set_status("two")
        eventually_picked(picker, one.address, two.address)
        namespace.set_status("one", ready=False)
        eventually_picked(picker, two.address)
        # It is kept an eye on all the same: its cache may outlive this.
        assert ("one", one.address) in declared(router)
        namespace.set_status("one")
        eventually_picked(picker, one.address, two.address)
        namespace.bind("two")
        namespace.delete_pod("two", grace_s=3600)
        eventually_picked(picker, one.address)
        assert declared(router) == {("one", one.address)}
        namespace.delete_pod("one")
        wait_until(lambda: picker.pick() == "", "no pod left")


def test_a_pod_that_ended_leaves_though_its_object_and_address_stay(namespace: Namespace) -> None:
    """A pod that Failed or Succeeded is no endpoint, whatever its other fields say."""
    namespace.pool()
    one, two = namespace.pod("one"), namespace.pod("two")
    with kube_router(namespace.config()) as router, closing(Picker(router)) as picker:
        eventually_picked(picker, one.address, two.address)
        namespace.set_status("two", phase="Failed")
        eventually_picked(picker, one.address)
        assert declared(router) == {("one", one.address)}


def test_a_pods_work_stays_in_the_ledger_when_it_leaves(namespace: Namespace) -> None:
    """Requests in flight on a pod that is deleted are counted until they end."""
    namespace.pool()
    one = namespace.pod("one")
    with kube_router(namespace.config()) as router, closing(Picker(router)) as picker:
        eventually_picked(picker, one.address)
        wait_until(lambda: router.requests_in_flight == 0, "all told as ended")
        picker.begin("held")
        namespace.delete_pod("one")
        wait_until(lambda: not declared(router), "the pod's end")
        assert router.requests_in_flight == 1
        picker.end("held")
        wait_until(lambda: router.requests_in_flight == 0, "its end was taken")


def test_a_new_pod_of_the_same_name_is_another_pod(namespace: Namespace) -> None:
    """Deleted and made again at once, a pod is what its new object says, and its old address is gone."""
    namespace.pool()
    one, stays = namespace.pod("one"), namespace.pod("stays")
    with kube_router(namespace.config()) as router, closing(Picker(router)) as picker:
        eventually_picked(picker, one.address, stays.address)
        namespace.delete_pod("one")
        again = namespace.pod("one", ready=False)
        eventually_picked(picker, stays.address)
        namespace.set_status("one")
        eventually_picked(picker, again.address, stays.address)
        assert declared(router) == {("one", again.address), ("stays", stays.address)}


def test_a_restarted_container_does_not_keep_its_blocks(namespace: Namespace) -> None:
    """Kubernetes' word that a container came anew is enough: the view of the former one is dropped."""
    namespace.pool()
    fake = namespace.servers["one"] = FakePod(namespace.port)
    with EnginePublisher(replay=False) as engine:
        ports = {"kvroute.dev/kv-events-port": str(engine.events_port)}
        namespace.make_pod("one", fake.host, annotations=ports)
        namespace.set_status("one")
        with (
            kube_router(namespace.config(replay_port=0)) as router,
            closing(Picker(router)) as picker,
        ):
            engine.wait_for_subscriber()
            engine.publish(stored([1, 2, 3, 4], TOKENS, block_size=BLOCK_TOKENS))
            wait_until(lambda: picker.cached_tokens(TOKENS) > 0, "its blocks are known")
            # Labels and readiness that change are no new life.
            namespace.patch_pod("one", {"metadata": {"labels": {"version": "2"}}})
            namespace.set_status("one", ready=False)
            wait_until(lambda: picker.pick() == "", "not Ready")
            namespace.set_status("one")
            wait_until(lambda: picker.cached_tokens(TOKENS) > 0, "its blocks are known still")
            namespace.set_status("one", restarts=1)
            wait_until(lambda: picker.cached_tokens(TOKENS) == 0, "its blocks are forgotten")
            # The former life's entry goes before the new one's comes.
            engines = router.index.engine_registry.linked_engines
            wait_until(lambda: engines() == 1, "it is followed anew")


def test_each_target_port_is_an_endpoint(namespace: Namespace) -> None:
    """A pod has an endpoint for each port of the pool; an annotation, under either name, takes ports out."""
    other = FakePod(0, "127.0.0.1")
    namespace.servers["other"] = other
    namespace.pool(ports=[namespace.port, other.port])
    both = namespace.servers["first"] = FakePod(namespace.port, other.host)
    namespace.make_pod("one", other.host)
    namespace.set_status("one")
    with kube_router(namespace.config()) as router, closing(Picker(router)) as picker:
        eventually_picked(picker, both.address, other.address)
        assert declared(router) == {("one-rank-0", both.address), ("one-rank-1", other.address)}
        namespace.patch_pod("one", {"metadata": {"annotations": {"llm-d.ai/active-ports": str(other.port)}}})
        eventually_picked(picker, other.address)
        annotations = {
            "llm-d.ai/active-ports": None,
            "inference.networking.k8s.io/active-ports": f"{namespace.port}",
        }
        namespace.patch_pod("one", {"metadata": {"annotations": annotations}})
        eventually_picked(picker, both.address)
        assert declared(router) == {("one-rank-0", both.address)}


def test_each_rank_publishes_at_a_port_of_its_own(namespace: Namespace) -> None:
    """Events of the second target port come from the next port, where nothing else is told."""
    other = namespace.servers["other"] = FakePod(0, "127.0.0.1")
    namespace.pool(ports=[namespace.port, other.port])
    first = namespace.servers["first"] = FakePod(namespace.port, other.host)
    namespace.make_pod("one", other.host, annotations={"kvroute.dev/kv-replay-port": "7000"})
    namespace.set_status("one")
    with kube_router(namespace.config(events_port=6000)) as router:
        wait_until(lambda: len(router.index.engine_registry.engines) == 2, "both are followed")
        streams = {
            engine.stream.pod: engine.stream for engine in router.index.engine_registry.engines.values()
        }
        told = {
            address: (stream.events_endpoint, stream.replay_endpoint) for address, stream in streams.items()
        }
        assert told == {
            first.address: ("tcp://127.0.0.1:6000", "tcp://127.0.0.1:7000"),
            other.address: ("tcp://127.0.0.1:6001", "tcp://127.0.0.1:7001"),
        }


def test_where_an_engine_says_that_it_publishes_it_is_followed(namespace: Namespace) -> None:
    """The engine's own account counts more than the flags, and an annotation more than that."""
    namespace.pool()
    one, two = namespace.pod("one", ready=False), namespace.pod("two", ready=False)
    for fake in (one, two):
        fake.sources = {
            str(rank): {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"tcp://*:{6000 + rank}",
            }
            for rank in range(2)
        }
    namespace.patch_pod("two", {"metadata": {"annotations": {"kvroute.dev/kv-events-port": "8000"}}})
    for name in ("one", "two"):
        namespace.set_status(name)
    with kube_router(namespace.config()) as router:
        wait_until(lambda: len(router.index.engine_registry.engines) == 4, "both ranks of both are followed")
        endpoints = {name: engine.stream for name, engine in router.index.engine_registry.engines.items()}
        assert endpoints[one.address].events_endpoint == f"tcp://{one.host}:6000"
        assert endpoints[f"{one.address}@dp1"].events_endpoint == f"tcp://{one.host}:6001"
        assert endpoints[one.address].replay_endpoint is None
        assert endpoints[two.address].events_endpoint == f"tcp://{two.host}:8000"


def test_the_pools_selector_and_its_end_are_followed(namespace: Namespace) -> None:
    """Another selector means other pods; a pool that is deleted has none, until it comes back."""
    namespace.pool()
    one, two = namespace.pod("one"), namespace.pod("two", labels={"app": "other"})
    with kube_router(namespace.config()) as router, closing(Picker(router)) as picker:
        eventually_picked(picker, one.address)
        namespace.pool(selector={"app": "other"})
        eventually_picked(picker, two.address)
        namespace.delete_pool()
        wait_until(lambda: picker.pick() == "", "a pool that is gone")
        namespace.pool()
        eventually_picked(picker, one.address)
        # A pod that stops matching is out, one that begins to is in.
        namespace.patch_pod("one", {"metadata": {"labels": {"app": "other"}}})
        namespace.patch_pod("two", {"metadata": {"labels": {"app": "llm"}}})
        eventually_picked(picker, two.address)
        wait_until(lambda: router.health.ready, "the router is ready")


def test_a_selector_needs_no_definitions(bare_namespace: Namespace) -> None:
    """With --endpoint-selector pods are found on an API server that knows no InferencePool."""
    one = bare_namespace.pod("one", labels={"app": "x", "role": "a"})
    bare_namespace.pod("two", labels={"app": "x", "role": "c"})
    config = bare_namespace.config(selector="app=x,role in (a,b)")
    with kube_router(config) as router, closing(Picker(router)) as picker:
        eventually_picked(picker, one.address)
        shown = json.loads(get(router, "/debug/discovery")[1])
        assert (shown["pool"], shown["endpoints"], shown["problems"]) == (None, 1, [])
        assert list(shown["watches"]) == ["pods"]


def test_a_router_is_not_ready_before_it_knows_its_pods(namespace: Namespace) -> None:
    """Until pool and pods are known /ready says what is missing; a pool without pods is known."""
    config = namespace.config()
    with kube_router(config, sync_timeout_s=0.0) as router:
        wait_until(
            lambda: f"InferencePool {namespace.name}/pool" in get(router, "/ready")[1].decode(), "the wait"
        )
        assert not router.health.ready
        namespace.pool()
        wait_until(lambda: get(router, "/ready")[0] == 200, "readiness")
        assert router.pods.snapshot() == {}


def test_a_router_is_not_ready_while_all_ready_pods_refuse_it(namespace: Namespace) -> None:
    """Pods that serve others refuse a router whose address their network policy has not learnt yet."""
    namespace.pool()
    namespace.pod("one", serves=False)
    with kube_router(namespace.config(), sync_timeout_s=3600.0) as router:
        wait_until(lambda: "WrongTargetPort" in get(router, "/debug/discovery")[1].decode(), "refusals")
        assert router.watch.synced
        assert get(router, "/ready")[0] == 503
        address = next(iter(router.pods.snapshot().values())).entry.address
        namespace.servers["one"] = FakePod(namespace.port, address)
        wait_until(lambda: get(router, "/ready")[0] == 200, "readiness")


def test_hundreds_of_pods_come_and_go(namespace: Namespace) -> None:
    """After much coming and going exactly the pods that there are are known; the one that stays served."""
    namespace.pool()
    # Every address of this machine is answered by one server, so that each pod is healthy.
    fake = namespace.servers["all"] = FakePod(namespace.port, "0.0.0.0")
    stays = namespace.pod("stays", serves=False)
    assert stays is None
    random, config = np.random.default_rng(3), namespace.config()
    with kube_router(config, refresh_interval_s=2.0) as router, closing(Picker(router)) as picker:
        wait_until(lambda: picker.pick() != "", "the pod that stays")
        alive: dict[str, bool] = {}
        for number in range(500):
            name = f"pod-{number}"
            namespace.pod(name, serves=False, ready=bool(random.integers(4)))
            alive[name] = True
            if random.integers(2):
                gone = str(random.choice([each for each, lives in alive.items() if lives]))
                namespace.delete_pod(gone)
                alive[gone] = False
            if number % 50 == 0:
                assert picker.pick() != ""
        left = {name for name, lives in alive.items() if lives} | {"stays"}
        wait_until(lambda: {name for name, _ in declared(router)} == left, "all that are left")
        assert fake.pages > 0
        assert picker.pick() != ""
    # Another router gets them in several pages.
    with kube_router(config, refresh_interval_s=2.0) as router:
        wait_until(lambda: {name for name, _ in declared(router)} == left, "all at once")
        assert len(left) > 100
