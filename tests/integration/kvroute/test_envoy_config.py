"""The `kvroute envoy-config` command: a real Envoy accepts what it prints."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from kvroute.envoy_config import main
from kvroute.stack import envoy_command

ROUTERS = ["--router", "router-1.example:9002", "127.0.0.1:9002", "[::1]:9002"]


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--door", "ext_proc"],
        ["--door", "ext_proc", "--responses", "full", "--listen", "[::]:80"],
        ["--responses", "skip", "--failure-mode-allow", "--pod", "10.0.0.1:8000", "pod-2.example:8000"],
    ],
)
def test_envoy_accepts_the_configuration(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Envoy validates the configuration for each door; it names every router, and resolves names."""
    assert main([*ROUTERS, *flags]) == 0
    config = tmp_path / "envoy.json"
    config.write_text(capsys.readouterr().out)
    done = subprocess.run(
        [envoy_command(), "--mode", "validate", "-c", str(config)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    clusters = {each["name"]: each for each in json.loads(config.read_text())["static_resources"]["clusters"]}
    (group,) = clusters["router"]["load_assignment"]["endpoints"]
    addresses = [each["endpoint"]["address"]["socket_address"] for each in group["lb_endpoints"]]
    assert [(each["address"], each["port_value"]) for each in addresses] == [
        ("router-1.example", 9002),
        ("127.0.0.1", 9002),
        ("::1", 9002),
    ]
    assert clusters["router"]["type"] == "STRICT_DNS"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "required: --router"),
        (["--router", "nine"], "argument --router: must be HOST:PORT, not 'nine'"),
        (["--router", "host:nine"], "argument --router: must be a whole number from 0 to 65535"),
        ([*ROUTERS, "--responses", "full"], "--responses full needs --door ext_proc"),
        ([*ROUTERS, "--failure-mode-allow"], "--failure-mode-allow needs --pod"),
        ([*ROUTERS, "--failure-mode-allow", "--door", "ext_proc"], "needs --door check_grpc"),
    ],
)
def test_wrong_flags_are_one_line(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong flag gives exit code 2 and one line that names it."""
    with pytest.raises(SystemExit) as caught:
        main(flags)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
