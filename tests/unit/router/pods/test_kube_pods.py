"""Conversion of pods and pools to endpoints, and the problems of invalid annotations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.config import PODS_MAX
from indexer.pod_entry import EVENT_LABELS, EventDefaults
from router.config.kube import KubeConfig
from router.pods.kube.objects import BadObjectError, OldPoolObject, PodObject, PoolObject, read
from router.pods.kube.pods import PodEndpoints, Pool, declared, endpoints_of, is_ready, pool_of
from tests.support.kube.objects import JSON, pod, pod_json, raw

ONE = KubeConfig(target_ports=(8000,), events_port=5557, replay_port=5558)
TWO = KubeConfig(target_ports=(8000, 8001), events_port=5557, replay_port=0)
EVENTS_PORT, REPLAY_PORT = "kvroute.io/kv-events-port", "kvroute.io/kv-replay-port"


def pods_of(*objects: PodObject, rules: KubeConfig = ONE) -> list[tuple[PodObject, PodEndpoints]]:
    """Return pods with their endpoints."""
    return [(each, endpoints_of(each, rules)) for each in objects]


def test_a_pod_has_an_endpoint_per_target_port() -> None:
    """With several target ports, names carry the rank, and events come from the events port plus the rank."""
    first, second = endpoints_of(pod(), TWO).entries
    assert [(each.name, each.namespace, each.pod) for each in (first, second)] == [
        ("a-rank-0", "test", "10.0.0.1:8000"),
        ("a-rank-1", "test", "10.0.0.1:8001"),
    ]
    assert first.labels == {"app": "x"}
    assert first.ready
    assert [each.events for each in (first, second)] == [
        EventDefaults(5557 + rank, None, snapshots=True, asks_engine=True, rank=rank) for rank in (0, 1)
    ]
    (only,) = endpoints_of(pod(), ONE).entries
    assert only.name == "a"
    assert only.events == EventDefaults(5557, 5558, snapshots=True, asks_engine=True, rank=None)
    assert endpoints_of(pod(address="fd00::1"), ONE).entries[0].pod == "[fd00::1]:8000"


NAMED = [{"name": "http", "containerPort": 8000}, {"name": "more", "containerPort": 8001}]


@pytest.mark.parametrize(
    ("containers", "ports"),
    [
        (None, []),
        ([{}], []),
        ([{"readinessProbe": {"exec": {"command": ["true"]}}}], []),
        ([{"readinessProbe": {"httpGet": {"port": 8000, "path": "/health"}}}], [8000]),
        ([{"readinessProbe": {"tcpSocket": {"port": 8001}}}, {}], [8001]),
        ([{"readinessProbe": {"grpc": {"port": 9000}}}], []),
        ([{"readinessProbe": {"httpGet": {"port": "more"}}, "ports": NAMED}], [8001]),
        ([{"readinessProbe": {"httpGet": {"port": "none"}}, "ports": NAMED}], []),
        ([{"livenessProbe": {"httpGet": {"port": 8000}}}], []),
    ],
)
def test_probed_ports_are_known(containers: Any, ports: list[int]) -> None:
    """An endpoint is probed if any container's readiness probe checks its port, by number or name."""
    probed = read(raw({**pod_json(), "spec": {"containers": containers}}), PodObject)
    assert endpoints_of(probed, TWO).probed == tuple(f"10.0.0.1:{port}" for port in ports)


@pytest.mark.parametrize(
    "fields",
    [
        {"address": None},
        {"address": ""},
        {"address": "10.0.0"},
        {"deletionTimestamp": "2026-01-01T00:00:00Z"},
        {"phase": "Succeeded"},
        {"phase": "Failed"},
    ],
)
def test_a_pod_without_address_or_finished_has_no_endpoints(fields: dict[str, Any]) -> None:
    """A pod without address, terminating or finished has no endpoints."""
    assert endpoints_of(pod(**fields), ONE) == PodEndpoints()


@pytest.mark.parametrize(
    ("conditions", "ready"),
    [
        (None, False),
        ([], False),
        ([{"type": "Ready", "status": "False"}], False),
        ([{"type": "Ready", "status": "Unknown"}], False),
        ([{"type": "ContainersReady", "status": "True"}], False),
        ([{"type": "Initialized", "status": "True"}, {"type": "Ready", "status": "True"}], True),
    ],
)
def test_a_pod_that_is_not_ready_keeps_its_endpoint(conditions: Any, ready: bool) -> None:
    """Readiness follows the condition Ready; without it the endpoint is kept, because its cache persists."""
    (entry,) = endpoints_of(pod(conditions=conditions), ONE).entries
    assert entry.ready == ready == is_ready(pod(conditions=conditions))


def test_an_epoch_identifies_a_pod_and_its_containers() -> None:
    """A new uid, container or restart changes the epoch; labels and readiness do not."""
    containers = [{"name": "engine", "restartCount": 0, "containerID": "containerd://1"}]
    life = endpoints_of(pod(), ONE).entries[0].epoch
    same = [{"ready": False}, {"labels": {"b": "c"}}, {"resourceVersion": "7"}]
    assert {endpoints_of(pod(**fields), ONE).entries[0].epoch for fields in same} == {life}
    others: list[dict[str, Any]] = [
        {"uid": "another"},
        {"containerStatuses": [{**containers[0], "restartCount": 1}]},
        {"containerStatuses": [{**containers[0], "containerID": "containerd://2"}]},
        {"containerStatuses": None},
    ]
    lives = [endpoints_of(pod(**fields), ONE).entries[0].epoch for fields in others]
    assert len({life, *lives}) == 1 + len(others)
    sidecar = {"name": "sidecar", "restartCount": 3}
    orders = [[sidecar, *containers], [*containers, sidecar]]
    both = [endpoints_of(pod(containerStatuses=order), ONE).entries[0].epoch for order in orders]
    assert both[0] == both[1]


@pytest.mark.parametrize(
    ("annotations", "ports", "complains"),
    [
        ({"llm-d.ai/active-ports": "8001"}, [8001], False),
        ({"inference.networking.k8s.io/active-ports": "8000, 8001 ,"}, [8000, 8001], False),
        (
            {"llm-d.ai/active-ports": "8001", "inference.networking.k8s.io/active-ports": "8000"},
            [8001],
            False,
        ),
        ({"llm-d.ai/active-ports": ""}, [], False),
        ({"llm-d.ai/active-ports": "9000"}, [], True),
        ({"llm-d.ai/active-ports": "8000,x"}, [8000], True),
    ],
)
def test_active_ports_select_the_ports_in_use(
    annotations: dict[str, str], ports: list[int], complains: bool
) -> None:
    """Ports that the annotation omits have no endpoint; unknown ports in it are a problem."""
    found = endpoints_of(pod(annotations=annotations), TWO)
    assert ([each.port for each in found.entries], bool(found.problem)) == (ports, complains)


def test_annotations_become_labels_of_the_pods_file() -> None:
    """Annotations set ports and paths, offset by the rank; the pod's own labels of these names do not."""
    annotations = {
        "kvroute.dev/kv-events-port": "6000",
        "kvroute.dev/kv-replay-port": "7000",
        "kvroute.dev/kv-events-topic": "kv@",
        "kvroute.dev/kv-snapshot": "false",
        "kvroute.dev/metrics-port": "8002",
        "kvroute.dev/metrics-path": "/prometheus/metrics",
        "kvroute.dev/admin-port": "9001",
        "kvroute.dev/unknown": "x",
    }
    found = endpoints_of(pod(annotations=annotations, labels={EVENTS_PORT: "1", "a": "b"}), TWO)
    assert found.problem == ""
    assert [dict(each.labels) for each in found.entries] == [
        {
            "a": "b",
            EVENTS_PORT: str(6000 + rank),
            REPLAY_PORT: str(7000 + rank),
            "kvroute.io/kv-events-topic": "kv@",
            "kvroute.io/kv-snapshot": "false",
            "kvroute.io/metrics-port": str(8002 + rank),
            "kvroute.io/metrics-path": "/prometheus/metrics",
            "kvroute.io/admin-port": str(9001 + rank),
        }
        for rank in (0, 1)
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kv-events-port", "0"),
        ("kv-events-port", "65535"),
        ("kv-replay-port", "x"),
        ("kv-ranks", "0"),
        ("kv-ranks", "2"),
        ("kv-events", "connects"),
        ("kv-events", "shouts"),
        ("kv-snapshot", "maybe"),
        ("kv-first-sequence", "2"),
        ("kv-events-topic", "\n"),
        ("metrics-port", "65535"),
        ("metrics-path", "metrics"),
        ("metrics-path", "/ HTTP/1.1\r\nx: y"),
    ],
)
def test_an_invalid_annotation_is_reported_and_ignored(name: str, value: str) -> None:
    """An invalid annotation is a problem, and the endpoint is as without it."""
    found = endpoints_of(pod(annotations={f"kvroute.dev/{name}": value}), TWO)
    assert len(found.entries) == 2
    assert found.entries[0].labels == {"app": "x"}
    assert found.problem.startswith(f"kvroute.dev/{name}: ")


def test_pods_may_connect_to_the_router_with_events_bind() -> None:
    """The annotation kv-events: connects is valid only with --events-bind."""
    rules = replace(ONE, replay_port=0, events_bind=True)
    found = endpoints_of(pod(annotations={"kvroute.dev/kv-events": "connects"}), rules)
    assert found.problem == ""
    assert found.entries[0].labels["kvroute.io/kv-events"] == "connects"


def test_of_two_pods_with_one_address_the_ready_one_is_used() -> None:
    """An address shared with an ended pod belongs to the Ready pod, else to the younger one."""
    old = pod("old", ready=False, creationTimestamp="2026-01-02T00:00:00Z")
    new = pod("new", creationTimestamp="2026-01-01T00:00:00Z")
    younger = pod("younger", creationTimestamp="2026-01-03T00:00:00Z")
    for order in ([old, new], [new, old]):
        assert [each.name for each in declared(pods_of(*order))[0]] == ["new"]
    assert [each.name for each in declared(pods_of(new, younger))[0]] == ["younger"]


def test_endpoints_are_bounded_and_ordered() -> None:
    """Endpoints above PODS_MAX are left out and counted, always the same ones."""
    numbers = range(PODS_MAX + 3)
    pods = [pod(f"p{number:05}", address=f"10.0.{number // 256}.{number % 256}") for number in numbers]
    entries, left_out = declared(reversed(pods_of(*pods)))
    assert (len(entries), left_out) == (PODS_MAX, 3)
    assert [each.name for each in entries[:2]] == ["p00000", "p00001"]


_FIELDS = ["podIP", "phase", "conditions", "containerStatuses"]
_KEYS = st.sampled_from(["llm-d.ai/active-ports", *(label.replace(".io", ".dev") for label in EVENT_LABELS)])


@given(
    st.dictionaries(st.sampled_from(["name", "uid", "labels", "annotations", "deletionTimestamp"]), JSON),
    st.dictionaries(st.sampled_from(_FIELDS), JSON),
)
def test_hostile_pods_are_rejected_or_harmless(metadata: dict[str, Any], status: dict[str, Any]) -> None:
    """A pod of any shape raises BadObjectError or gives usable endpoints."""
    known = pod_json()
    made = {"metadata": {**known["metadata"], **metadata}, "status": {**known["status"], **status}}
    try:
        usable = read(raw(made), PodObject)
    except BadObjectError:
        return
    for entry in endpoints_of(usable, TWO).entries:
        assert entry.pod.endswith((":8000", ":8001"))


@given(st.dictionaries(_KEYS, st.text(max_size=8) | st.integers(0, 70_000).map(str), max_size=6))
def test_any_annotations_give_valid_streams(annotations: dict[str, str]) -> None:
    """Any annotations give event streams with valid ports."""
    annotations = {**annotations, "kvroute.dev/model": "m"}
    for rules in (ONE, TWO):
        for entry in endpoints_of(pod(annotations=annotations), rules).entries:
            stream = entry.stream()
            assert stream is not None
            assert stream.by_rank()


def pool_json(**spec: Any) -> Any:
    """Return a pool of version v1."""
    known = {"selector": {"matchLabels": {"app": "x"}}, "targetPorts": [{"number": 8000}, {"number": 8001}]}
    return {"metadata": {"name": "p", "uid": "u"}, "spec": {**known, **spec}}


def test_a_pool_has_selector_and_ports() -> None:
    """Both versions of InferencePool are read; one being deleted gives None."""
    assert pool_of(read(raw(pool_json()), PoolObject)) == Pool("p", "u", "app=x", (8000, 8001))
    old = {"metadata": {"name": "p"}, "spec": {"selector": {"app": "x"}, "targetPortNumber": 9}}
    assert pool_of(read(raw(old), OldPoolObject)) == Pool("p", "", "app=x", (9,))
    two = pool_json(selector={"matchLabels": {"b": "2", "a": "1"}})
    assert pool_of(read(raw(two), PoolObject)) == Pool("p", "u", "a=1,b=2", (8000, 8001))
    with pytest.raises(BadObjectError, match="every pod"):
        pool_of(read(raw(pool_json(selector={"matchLabels": {}})), PoolObject))
    ending = pool_json()
    ending["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert pool_of(read(raw(ending), PoolObject)) is None


@given(st.dictionaries(st.sampled_from(["selector", "targetPorts"]), JSON, min_size=1))
def test_hostile_pools_are_rejected_or_usable(spec: dict[str, Any]) -> None:
    """A pool of any shape raises BadObjectError or has a selector and valid ports."""
    try:
        pool = pool_of(read(raw(pool_json(**spec)), PoolObject))
    except BadObjectError:
        return
    assert pool is not None
    assert pool.selector
    assert all(0 < port < 65_536 for port in pool.ports)
