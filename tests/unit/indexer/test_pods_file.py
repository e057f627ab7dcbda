"""Pods file: parsing, and errors of invalid files."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.config import PODS_MAX, PodStream
from indexer.errors import ConfigError
from indexer.pod_entry import EventDefaults, PodEntry, parse_pods
from tests.support.paths import ROOT

GOOD = """
endpoints:
  - name: a
    namespace: prod
    address: 10.0.0.1
    port: "8000"
    labels:
      kvroute.io/model: tiny
      kvroute.io/kv-events-port: 6000
      kvroute.io/kv-replay-port: "6001"
      llm-d.ai/role: decode
  - name: b
    address: fd00::1
    port: 8001
    labels: {kvroute.io/model: tiny}
  - {name: c, address: 10.0.0.1, port: 8001}
"""


def test_the_example_in_the_documentation_is_read() -> None:
    """The pods file in docs/configuration.md is valid."""
    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    example = re.search(r"^## The pods' file$.*?^```yaml$(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert example is not None
    first, second = parse_pods(example[1], "pods.yaml")
    assert (first.pod, first.namespace, first.labels) == ("10.0.0.11:8000", "default", {})
    assert (second.namespace, second.labels["kvroute.io/kv-replay-port"]) == ("llm", "5558")


def test_endpoints_are_read_in_order() -> None:
    """Names, defaults, quoted and unquoted ports, and labels are read as written."""
    a, b, c = parse_pods(GOOD, "pods.yaml")
    assert (a.name, a.namespace, a.pod, a.labels["llm-d.ai/role"]) == ("a", "prod", "10.0.0.1:8000", "decode")
    assert (b.namespace, b.pod) == ("default", "[fd00::1]:8001")
    assert c == PodEntry("c", "default", "10.0.0.1", 8001, {})


def test_labels_define_the_event_streams() -> None:
    """Ports come from the labels, else from the defaults; a pod without a model has no stream."""
    a, b, c = parse_pods(GOOD, "pods.yaml")
    assert replace(a, events=EventDefaults(1, 2)).stream() == PodStream(
        "10.0.0.1:8000", "tiny", "tcp://10.0.0.1:6000", "tcp://10.0.0.1:6001"
    )
    assert b.stream() == PodStream("[fd00::1]:8001", "tiny", "tcp://[fd00::1]:5557", None)
    assert replace(b, events=EventDefaults(7, 8)).stream() == PodStream(
        "[fd00::1]:8001", "tiny", "tcp://[fd00::1]:7", "tcp://[fd00::1]:8"
    )
    assert c.stream() is None


def test_labels_define_how_a_pod_publishes() -> None:
    """Labels set who connects, the number of ranks, the snapshot URL and the first sequence number."""
    labels = {
        "kvroute.io/model": "tiny",
        "kvroute.io/kv-events": "connects",
        "kvroute.io/kv-snapshot": "true",
        "kvroute.io/kv-first-sequence": "1",
    }
    stream = PodEntry("a", "default", "fd00::1", 8000, labels).stream()
    assert stream == PodStream(
        "[fd00::1]:8000",
        "tiny",
        None,
        snapshot_url="http://[fd00::1]:8000/kv_events/snapshot",
        first_sequence=1,
    )
    ranked = PodEntry("a", "default", "10.0.0.1", 8000, {"kvroute.io/model": "m", "kvroute.io/kv-ranks": "3"})
    stream = replace(ranked, events=EventDefaults(replay_port=6000)).stream()
    assert stream is not None
    assert [(each.holder, each.events_endpoint, each.replay_endpoint) for each in stream.by_rank()] == [
        ("10.0.0.1:8000", "tcp://10.0.0.1:5557", "tcp://10.0.0.1:6000"),
        ("10.0.0.1:8000@dp1", "tcp://10.0.0.1:5558", "tcp://10.0.0.1:6001"),
        ("10.0.0.1:8000@dp2", "tcp://10.0.0.1:5559", "tcp://10.0.0.1:6002"),
    ]


def test_snapshots_come_from_the_declared_socket() -> None:
    """The label kvroute.io/kv-snapshot-port is preferred to snapshots over HTTP."""
    labels = {"kvroute.io/model": "m", "kvroute.io/kv-snapshot": "true", "kvroute.io/kv-snapshot-port": "56"}
    stream = PodEntry("a", "default", "fd00::1", 8000, labels).stream()
    assert stream is not None
    assert stream.snapshot_url == "tcp://[fd00::1]:56"


def test_snapshots_come_from_the_administration_port() -> None:
    """The label kvroute.io/admin-port sets the port of snapshots, to which the token is sent."""
    labels = {"kvroute.io/model": "m", "kvroute.io/kv-snapshot": "true"}
    pod = PodEntry("a", "default", "fd00::1", 8000, {**labels, "kvroute.io/admin-port": "8001"})
    stream = pod.stream()
    assert stream is not None
    assert (pod.admin, stream.pod) == ("[fd00::1]:8001", "[fd00::1]:8000")
    assert stream.snapshot_url == "http://[fd00::1]:8001/kv_events/snapshot"
    assert stream.snapshot_admin
    plain = PodEntry("a", "default", "fd00::1", 8000, labels)
    assert plain.admin is None
    assert (stream := plain.stream()) is not None
    assert not stream.snapshot_admin


def test_a_file_may_name_no_pod() -> None:
    """An empty list of endpoints is valid."""
    assert parse_pods("endpoints: []", "pods.yaml") == ()


ONE = "endpoints:\n  - name: a\n    address: 10.0.0.1\n    port: 8000\n"


@pytest.mark.parametrize(
    ("text", "where", "problem"),
    [
        ("", "pods.yaml", "is empty"),
        ("pods: []", "pods.yaml:1: .pods", "unknown"),
        ("- a", "pods.yaml:1: the file", "must be a mapping with the list 'endpoints'"),
        ("endpoints: 5", "pods.yaml:1: endpoints", "must be a list"),
        ("endpoints: [5]", "pods.yaml:1: endpoints[0]", "must be a mapping"),
        ("endpoints: [", "pods.yaml", "not valid YAML"),
        ("endpoints: *x", "pods.yaml", "not valid YAML"),
        ("\0", "pods.yaml", "not valid YAML"),
        (ONE + "    lables: {}\n", "pods.yaml:5: endpoints[0].lables", "unknown"),
        (ONE.replace("8000", "0"), "pods.yaml:4: endpoints[0].port", "1..65535"),
        (ONE.replace("8000", "65536"), "pods.yaml:4: endpoints[0].port", "1..65535"),
        (ONE.replace("8000", "²"), "pods.yaml:4: endpoints[0].port", "1..65535"),
        (ONE.replace("10.0.0.1", "host"), "pods.yaml:3: endpoints[0].address", "IP address"),
        (ONE.replace("name: a", "nickname: a"), "pods.yaml:2: endpoints[0].nickname", "unknown"),
        (ONE.replace("    port: 8000\n", ""), "pods.yaml:2: endpoints[0].port", "missing"),
        (ONE + "    port: 1\n", "pods.yaml:5: endpoints[0].port", "twice"),
        (ONE + ONE.split("\n", 1)[1], "pods.yaml:5: endpoints[1]", "10.0.0.1:8000"),
        (ONE + "    labels: [a]\n", "pods.yaml:5: endpoints[0].labels", "must be a mapping"),
        (ONE + "    labels: {a: }\n", "pods.yaml:5: endpoints[0].labels[a]", "must be a text"),
        (ONE + "    labels: {kvroute.io/kv-events: maybe}\n", "pods.yaml:5", "listens or connects"),
        (ONE + "    labels: {kvroute.io/kv-ranks: 0}\n", "pods.yaml:5", "1..256"),
        (ONE + "    labels: {kvroute.io/metrics-port: 0}\n", "pods.yaml:5", "1..65535"),
        (ONE + "    labels: {kvroute.io/admin-port: x}\n", "pods.yaml:5", "1..65535"),
        (ONE + "    labels: {kvroute.io/metrics-path: metrics}\n", "pods.yaml:5", "a path such as /metrics"),
        (
            ONE
            + "    labels: {kvroute.io/model: m, kvroute.io/kv-ranks: 3, kvroute.io/kv-events-port: 65534}\n",
            "pods.yaml:2: endpoints[0].labels",
            "65534 + rank 2 is beyond 65535",
        ),
        (
            ONE + "    labels:\n      kvroute.io/kv-events-port: x\n",
            "pods.yaml:6: endpoints[0].labels[kvroute.io/kv-events-port]",
            "1..65535",
        ),
    ],
)
def test_what_is_wrong_is_named(text: str, where: str, problem: str) -> None:
    """An error names file, line and field, and the expected value."""
    with pytest.raises(ConfigError) as caught:
        parse_pods(text, "pods.yaml")
    assert str(caught.value).startswith(where)
    assert problem in str(caught.value)


def test_a_huge_file_is_refused() -> None:
    """A file above 1 MiB is not parsed."""
    with pytest.raises(ConfigError, match="larger"):
        parse_pods("#" * (1 << 20) + "\nendpoints: []", "pods.yaml")


@given(st.text(max_size=200) | st.lists(st.sampled_from(GOOD.split("\n"))).map("\n".join))
def test_any_text_is_pods_or_a_config_error(text: str) -> None:
    """Any text is either valid or a ConfigError."""
    with suppress(ConfigError):
        parse_pods(text, "pods.yaml")


def test_more_pods_than_can_be_followed_are_refused() -> None:
    """The error names the first endpoint above the limit."""
    lines = [f"  - {{name: p{n}, address: 10.0.{n >> 8}.{n & 255}, port: 80}}" for n in range(PODS_MAX + 1)]
    assert len(parse_pods("\n".join(["endpoints:", *lines[:-1]]), "pods.yaml")) == PODS_MAX
    with pytest.raises(ConfigError, match=rf"pods\.yaml:{PODS_MAX + 2}: endpoints\[{PODS_MAX}\]"):
        parse_pods("\n".join(["endpoints:", *lines]), "pods.yaml")
