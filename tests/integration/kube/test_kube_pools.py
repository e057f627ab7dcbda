"""One router for several InferencePools of a real API server, each at a port of its own."""

from __future__ import annotations

import json
from contextlib import closing

from tests.support.kube.cluster_objects import POOL, Namespace, Picker, eventually, kube_router, rewritten
from tests.support.router.server import get

OTHER, OTHER_PORT = "other", "grpc-other"
OTHER_SELECTOR = {"app": "other"}


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


def test_a_pod_may_be_in_several_pools(namespace: Namespace) -> None:
    """A pod that two pools select is picked at the port of each; both count it as theirs."""
    namespace.pool(selector={"tier": "all"})
    namespace.pool(OTHER, selector=OTHER_SELECTOR)
    one = namespace.pod("one", labels={"tier": "all"})
    two = namespace.pod("two", labels={"tier": "all", **OTHER_SELECTOR})
    with (
        kube_router(namespace.config(more_pools=((OTHER, 0),))) as router,
        closing(Picker(router)) as picker,
        closing(Picker(router, OTHER_PORT)) as other,
    ):
        eventually(lambda: picker.picks() == {one.address, two.address}, "both are picked")
        assert other.picks() == {two.address}
        page = get(router, "/metrics")[1].decode()
        for pool, pods in ((POOL, 2), (OTHER, 1)):
            assert f'kvroute_discovery_objects{{kind="pods",pool="{pool}"}} {pods}.0' in page
        namespace.delete_pool(OTHER)
        eventually(lambda: other.pick() == "", "the other pool's pods are forgotten")
        assert picker.picks() == {one.address, two.address}


def test_each_pool_has_rewrites_of_its_own(namespace: Namespace) -> None:
    """A rewrite applies at the port of its pool alone."""
    namespace.pool()
    namespace.pool(OTHER, selector=OTHER_SELECTOR)
    namespace.pod("one")
    namespace.pod("two", labels=OTHER_SELECTOR)
    namespace.rewrite("theirs", "alias", "kvroute-tiny", pool=OTHER)
    with kube_router(namespace.config(more_pools=((OTHER, 0),)), compat="answers") as router:
        eventually(lambda: rewritten(router, "alias", OTHER_PORT) == "kvroute-tiny", "rewritten")
        assert rewritten(router, "alias") == ""
        assert rewritten(router, "kvroute-tiny") == "kvroute-tiny"


def test_a_ready_router_knows_the_pods_of_every_pool(namespace: Namespace) -> None:
    """A router is ready once all pools that exist are listed; one that is missing does not hold it up."""
    namespace.pool()
    namespace.pool(OTHER, selector=OTHER_SELECTOR)
    namespace.pod("one")
    two = namespace.pod("two", labels=OTHER_SELECTOR)
    config = namespace.config(more_pools=((OTHER, 0), ("missing", 0)))
    for _ in range(3):
        with kube_router(config) as router, closing(Picker(router, OTHER_PORT)) as other:
            eventually(lambda router=router: get(router, "/ready")[0] == 200, "ready")
            assert other.pick() == two.address
