"""From pods and pools to endpoints: what counts, what is passed over, what is complained of."""

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
from tests.unit.kube_objects import JSON, pod, pod_json, raw

ONE = KubeConfig(target_ports=(8000,), events_port=5557, replay_port=5558)
TWO = KubeConfig(target_ports=(8000, 8001), events_port=5557, replay_port=0)
EVENTS_PORT, REPLAY_PORT = "kvroute.io/kv-events-port", "kvroute.io/kv-replay-port"


def pods_of(*objects: PodObject, rules: KubeConfig = ONE) -> list[tuple[PodObject, PodEndpoints]]:
    """Pods with what they are to us."""
    return [(each, endpoints_of(each, rules)) for each in objects]


def test_a_pod_is_an_endpoint_for_each_target_port() -> None:
    """Names of several carry the rank, which is the port's place; events come from the port + rank."""
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
def test_ports_that_readiness_probes_ask_are_known(containers: Any, ports: list[int]) -> None:
    """Endpoints whose port some container's readiness probe asks are told from others, also by its name."""
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
def test_a_pod_without_an_address_or_at_its_end_is_none(fields: dict[str, Any]) -> None:
    """What has no address yet, is ending or is over has no endpoints."""
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
def test_a_pod_that_is_not_ready_is_an_endpoint_that_takes_nothing(conditions: Any, ready: bool) -> None:
    """Only the condition Ready counts; without it the endpoint stays known, since its cache does."""
    (entry,) = endpoints_of(pod(conditions=conditions), ONE).entries
    assert entry.ready == ready == is_ready(pod(conditions=conditions))


def test_a_life_is_a_pods_and_its_containers() -> None:
    """Another uid, another container or another restart is another life; labels and readiness are not."""
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
def test_an_annotation_names_the_ports_in_use(
    annotations: dict[str, str], ports: list[int], complains: bool
) -> None:
    """Ports that it does not name are out, whatever else it names is complained of."""
    found = endpoints_of(pod(annotations=annotations), TWO)
    assert ([each.port for each in found.entries], bool(found.complaint)) == (ports, complains)


def test_annotations_tell_where_a_pod_publishes_and_tells_its_load() -> None:
    """They become the labels of a pods file, ports counted on by rank; a pod's own labels of that kind go."""
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
    assert found.complaint == ""
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
def test_a_bad_annotation_is_named_and_passed_over(name: str, value: str) -> None:
    """The endpoint stays, as if the annotation were not there."""
    found = endpoints_of(pod(annotations={f"kvroute.dev/{name}": value}), TWO)
    assert len(found.entries) == 2
    assert found.entries[0].labels == {"app": "x"}
    assert found.complaint.startswith(f"kvroute.dev/{name}: ")


def test_pods_may_connect_to_us_where_we_listen() -> None:
    """The annotation for that counts only beside --events-bind."""
    rules = replace(ONE, replay_port=0, events_bind=True)
    found = endpoints_of(pod(annotations={"kvroute.dev/kv-events": "connects"}), rules)
    assert found.complaint == ""
    assert found.entries[0].labels["kvroute.io/kv-events"] == "connects"


def test_of_two_pods_with_one_address_the_living_one_counts() -> None:
    """An address that was given to a new pod before the old one's end was told is the new one's."""
    old = pod("old", ready=False, creationTimestamp="2026-01-02T00:00:00Z")
    new = pod("new", creationTimestamp="2026-01-01T00:00:00Z")
    younger = pod("younger", creationTimestamp="2026-01-03T00:00:00Z")
    for order in ([old, new], [new, old]):
        assert [each.name for each in declared(pods_of(*order))[0]] == ["new"]
    assert [each.name for each in declared(pods_of(new, younger))[0]] == ["younger"]


def test_endpoints_are_bounded_and_in_order() -> None:
    """More than can be followed are left out, always the same ones, and counted."""
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
def test_hostile_pods_are_refused_or_harmless(metadata: dict[str, Any], status: dict[str, Any]) -> None:
    """A pod of any shape is a bad object, or one whose endpoints can be used."""
    known = pod_json()
    made = {"metadata": {**known["metadata"], **metadata}, "status": {**known["status"], **status}}
    try:
        usable = read(raw(made), PodObject)
    except BadObjectError:
        return
    for entry in endpoints_of(usable, TWO).entries:
        assert entry.pod.endswith((":8000", ":8001"))


@given(st.dictionaries(_KEYS, st.text(max_size=8) | st.integers(0, 70_000).map(str), max_size=6))
def test_any_annotations_leave_streams_that_can_be_followed(annotations: dict[str, str]) -> None:
    """Whatever a pod is annotated with, its streams have ports that there are."""
    annotations = {**annotations, "kvroute.dev/model": "m"}
    for rules in (ONE, TWO):
        for entry in endpoints_of(pod(annotations=annotations), rules).entries:
            stream = entry.stream()
            assert stream is not None
            assert stream.by_rank()


def pool_json(**spec: Any) -> Any:
    """A pool of the v1 definition."""
    known = {"selector": {"matchLabels": {"app": "x"}}, "targetPorts": [{"number": 8000}, {"number": 8001}]}
    return {"metadata": {"name": "p", "uid": "u"}, "spec": {**known, **spec}}


def test_a_pool_tells_selector_and_ports() -> None:
    """Both definitions of InferencePool are read; one that is being deleted is none."""
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
def test_hostile_pools_are_refused_or_usable(spec: dict[str, Any]) -> None:
    """A pool of any shape is a bad object, or has a selector and ports that there are."""
    try:
        pool = pool_of(read(raw(pool_json(**spec)), PoolObject))
    except BadObjectError:
        return
    assert pool is not None
    assert pool.selector
    assert all(0 < port < 65_536 for port in pool.ports)
