"""Flags of discovery in Kubernetes: their values, and contradictions among them."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.app.config import parse_flags
from router.config.kube import OLD_GROUP, KubeConfig
from router.errors import ConfigError

SELECTOR = ["--endpoint-selector=app=x,role in (a,b)", "--endpoint-target-ports=8000, 8001"]


def test_a_pool_needs_only_its_name() -> None:
    """With --pool-name alone, all other settings have defaults."""
    assert parse_flags(["--pool-name=p"])[0].kube == KubeConfig(pool="p")
    assert parse_flags(["--pods-file=/pods.yaml"])[0].kube is None


def test_all_flags_are_read_with_their_units() -> None:
    """Names, ports, paths and durations reach the configuration."""
    flags = ["--pool-name=p", "--pool-namespace=n", f"--pool-group={OLD_GROUP}", "--kv-events-port=1"]
    flags += ["--kv-replay-port=0", "--kubeconfig=/k", "--kube-deadline=1m30s", "--events-bind=tcp://*:5557"]
    assert parse_flags(flags)[0].kube == KubeConfig(
        pool="p",
        pool_group=OLD_GROUP,
        namespace="n",
        events_port=1,
        replay_port=0,
        events_bind=True,
        kubeconfig=Path("/k"),
        deadline_s=90.0,
    )
    config = parse_flags(SELECTOR)[0].kube
    assert config == KubeConfig(selector="app=x,role in (a,b)", target_ports=(8000, 8001))


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--pool-name=p", *SELECTOR], "either --pool-name or --endpoint-selector"),
        (["--pool-name=p", "--pods-file=/p"], "exactly one of"),
        ([*SELECTOR, "--pods-file=/p"], "exactly one of"),
        (SELECTOR[:1], "must be given together"),
        (["--pool-name=p", SELECTOR[1]], "must be given together"),
        (["--pool-name=p", "--resources-file=/r"], "--resources-file"),
        ([], "exactly one of"),
    ],
)
def test_contradicting_flags_are_rejected(argv: list[str], part: str) -> None:
    """The error for contradicting flags says which to give."""
    with pytest.raises(ConfigError, match=part):
        parse_flags(argv)


@pytest.mark.parametrize(
    "flag",
    [
        "--endpoint-selector=",
        "--endpoint-target-ports=0",
        "--endpoint-target-ports=1,1",
        "--endpoint-target-ports=1,2,3,4,5,6,7,8,9",
        "--endpoint-target-ports=",
        "--kv-events-port=65500",
        "--kv-replay-port=-1",
        "--pool-group=other",
        "--kube-deadline=0s",
    ],
)
def test_an_invalid_value_is_rejected_by_its_flag(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An invalid value ends the process with an error that names the flag."""
    with pytest.raises(SystemExit):
        parse_flags([flag])
    assert f"argument {flag.partition('=')[0]}" in capsys.readouterr().err
