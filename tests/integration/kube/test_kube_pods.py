"""Router that discovers its pods through a real API server: which pods are picked, and when no longer."""

from __future__ import annotations

import json
from contextlib import closing

import numpy as np

from router.app.server import RouterServer
from tests.support.indexer.engine_publisher import EnginePublisher, stored
from tests.support.kube.cluster_objects import Namespace, Picker, eventually_picked, kube_router
from tests.support.router.doors import wait_until
from tests.support.router.server import FakePod, get

BLOCK_TOKENS = 16
TOKENS = list(range(1000, 1000 + 4 * BLOCK_TOKENS))


def declared(router: RouterServer) -> set[tuple[str, str]]:
    """Return name and address of all known endpoints."""
    return {(pod.name, pod.address) for pod in router.pods.current.values()}


def test_only_ready_pods_of_the_pool_are_picked(namespace: Namespace) -> None:
    """A pod is picked while it is Ready, and no longer once it terminates or is deleted."""
    namespace.pool()
    one, two = namespace.pod("one"), namespace.pod("two", ready=False)
    with kube_router(namespace.config()) as router, closing(Picker(router)) as picker:
        eventually_picked(picker, one.address)
        namespace.set_status("two")
        eventually_picked(picker, one.address, two.address)
        namespace.set_status("one", ready=False)
        eventually_picked(picker, two.address)
        # The pod stays known, because its cache may persist.
        assert ("one", one.address) in declared(router)
        namespace.set_status("one")
        eventually_picked(picker, one.address, two.address)
        namespace.bind("two")
        namespace.delete_pod("two", grace_s=3600)
        eventually_picked(picker, one.address)
        assert declared(router) == {("one", one.address)}
        namespace.delete_pod("one")
        wait_until(lambda: picker.pick() == "", "no pod is left")


def test_a_finished_pod_is_not_picked(namespace: Namespace) -> None:
    """A pod that Failed or Succeeded is no endpoint, whatever its other fields say."""
    namespace.pool()
    one, two = namespace.pod("one"), namespace.pod("two")
    with kube_router(namespace.config()) as router, closing(Picker(router)) as picker:
        eventually_picked(picker, one.address, two.address)
        namespace.set_status("two", phase="Failed")
        eventually_picked(picker, one.address)
        assert declared(router) == {("one", one.address)}


def test_requests_of_a_deleted_pod_stay_counted(namespace: Namespace) -> None:
    """Requests in flight on a deleted pod are counted until they end."""
    namespace.pool()
    one = namespace.pod("one")
    with kube_router(namespace.config()) as router, closing(Picker(router)) as picker:
        eventually_picked(picker, one.address)
        wait_until(lambda: len(router.lifecycle.ledger) == 0, "all requests have ended")
        picker.begin("held")
        namespace.delete_pod("one")
        wait_until(lambda: not declared(router), "the pod is removed")
        assert len(router.lifecycle.ledger) == 1
        picker.end("held")
        wait_until(lambda: len(router.lifecycle.ledger) == 0, "its end is recorded")


def test_a_pod_recreated_with_the_same_name_is_new(namespace: Namespace) -> None:
    """A pod that is deleted and recreated has its new address, and the old one is gone."""
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


def test_a_restarted_container_loses_its_view(namespace: Namespace) -> None:
    """A container restart reported by Kubernetes drops the view of the pod's cache."""
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
            # Changed labels and readiness do not change the epoch.
            namespace.patch_pod("one", {"metadata": {"labels": {"version": "2"}}})
            namespace.set_status("one", ready=False)
            wait_until(lambda: picker.pick() == "", "not Ready")
            namespace.set_status("one")
            wait_until(lambda: picker.cached_tokens(TOKENS) > 0, "its blocks are still known")
            namespace.set_status("one", restarts=1)
            wait_until(lambda: picker.cached_tokens(TOKENS) == 0, "its blocks are dropped")
            # The old engine's entry is removed before the new one is added.
            engines = router.index.engine_registry.linked_engines
            wait_until(lambda: engines() == 1, "it is followed again")


def test_each_target_port_is_an_endpoint(namespace: Namespace) -> None:
    """A pod has one endpoint per target port of the pool, except for ports that an annotation disables."""
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


def test_each_rank_has_its_own_events_port(namespace: Namespace) -> None:
    """Events of the second target port come from the next port, unless configured otherwise."""
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


def test_an_engines_reported_events_port_is_used(namespace: Namespace) -> None:
    """The port that an engine reports overrides the flags, and an annotation overrides both."""
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
        wait_until(
            lambda: len(router.index.engine_registry.engines) == 4, "both ranks of both pods are followed"
        )
        endpoints = {name: engine.stream for name, engine in router.index.engine_registry.engines.items()}
        assert endpoints[one.address].events_endpoint == f"tcp://{one.host}:6000"
        assert endpoints[f"{one.address}@dp1"].events_endpoint == f"tcp://{one.host}:6001"
        assert endpoints[one.address].replay_endpoint is None
        assert endpoints[two.address].events_endpoint == f"tcp://{two.host}:8000"


def test_changes_of_the_pool_are_followed(namespace: Namespace) -> None:
    """A new selector selects other pods; a deleted pool has none until it is recreated."""
    namespace.pool()
    one, two = namespace.pod("one"), namespace.pod("two", labels={"app": "other"})
    with kube_router(namespace.config()) as router, closing(Picker(router)) as picker:
        eventually_picked(picker, one.address)
        namespace.pool(selector={"app": "other"})
        eventually_picked(picker, two.address)
        namespace.delete_pool()
        wait_until(lambda: picker.pick() == "", "the pool is deleted")
        namespace.pool()
        eventually_picked(picker, one.address)
        # Pods follow changes of their own labels too.
        namespace.patch_pod("one", {"metadata": {"labels": {"app": "other"}}})
        namespace.patch_pod("two", {"metadata": {"labels": {"app": "llm"}}})
        eventually_picked(picker, two.address)
        wait_until(lambda: router.health.ready, "the router is ready")


def test_a_selector_needs_no_crds(bare_namespace: Namespace) -> None:
    """With --endpoint-selector, pods are found on an API server without InferencePool."""
    one = bare_namespace.pod("one", labels={"app": "x", "role": "a"})
    bare_namespace.pod("two", labels={"app": "x", "role": "c"})
    config = bare_namespace.config(selector="app=x,role in (a,b)")
    with kube_router(config) as router, closing(Picker(router)) as picker:
        eventually_picked(picker, one.address)
        shown = json.loads(get(router, "/debug/discovery")[1])
        assert (shown["pool"], shown["endpoints"], shown["problems"]) == (None, 1, [])
        assert list(shown["watches"]) == ["pods"]


def test_a_router_is_not_ready_before_it_knows_its_pods(namespace: Namespace) -> None:
    """Until pool and pods are known, /ready reports what is missing; an empty pool counts as known."""
    config = namespace.config()
    with kube_router(config, sync_timeout_s=0.0) as router:
        wait_until(
            lambda: f"InferencePool {namespace.name}/pool" in get(router, "/ready")[1].decode(), "the wait"
        )
        assert not router.health.ready
        namespace.pool()
        wait_until(lambda: get(router, "/ready")[0] == 200, "readiness")
        assert router.pods.current == {}


def test_a_router_is_not_ready_while_all_pods_refuse_it(namespace: Namespace) -> None:
    """If all Ready pods refuse connections of the router, it is not ready."""
    namespace.pool()
    namespace.pod("one", serves=False)
    with kube_router(namespace.config(), sync_timeout_s=3600.0) as router:
        wait_until(
            lambda: "WrongTargetPort" in get(router, "/debug/discovery")[1].decode(), "refusals are reported"
        )
        assert router.watch.synced
        assert get(router, "/ready")[0] == 503
        address = next(iter(router.pods.current.values())).entry.address
        namespace.servers["one"] = FakePod(namespace.port, address)
        wait_until(lambda: get(router, "/ready")[0] == 200, "readiness")


def test_hundreds_of_pods_come_and_go(namespace: Namespace) -> None:
    """After many changes exactly the existing pods are known, and the remaining one is always served."""
    namespace.pool()
    # One server answers on all loopback addresses, so that each pod is healthy.
    fake = namespace.servers["all"] = FakePod(namespace.port, "0.0.0.0")
    stays = namespace.pod("stays", serves=False)
    assert stays is None
    random, config = np.random.default_rng(3), namespace.config()
    with kube_router(config, refresh_interval_s=2.0) as router, closing(Picker(router)) as picker:
        wait_until(lambda: picker.pick() != "", "the remaining pod")
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
        wait_until(lambda: {name for name, _ in declared(router)} == left, "all remaining pods")
        assert fake.pages > 0
        assert picker.pick() != ""
    # A second router receives the same pods in several pages.
    with kube_router(config, refresh_interval_s=2.0) as router:
        wait_until(lambda: {name for name, _ in declared(router)} == left, "all pods at once")
        assert len(left) > 100
