"""Parsing of flags, durations and the configuration file, and the kvroute command."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer import ConfigError as IndexerConfigError
from kvroute import cli
from router.app.config import RouterConfig, parse_flags
from router.config.fields import read_text, seconds
from router.config.picker_file import parse_config
from router.errors import ConfigError

PODS = ["--pods-file", "/pods.yaml"]
GOOD = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- name: pods
  type: file-discovery
  parameters:
    path: pods.yaml
    watchFile: true
dataLayer:
  discovery:
    pluginRef: pods
"""


_REPEATED = "".join(
    f"\n- &{new} [{', '.join([f'*{old}'] * 8)}]" for old, new in zip("abcdefghi", "bcdefghij", strict=True)
)
PICKS = GOOD.partition("plugins:")[0] + "plugins: [{type: queue-scorer}]\n"


def test_defaults_match_the_reference() -> None:
    """An empty command line has the ports, drain timeout and tokenizer of llm-d's endpoint picker."""
    config, flags = parse_flags(PODS)
    assert config == RouterConfig(pods_file=Path("/pods.yaml"))
    assert (config.grpc_port, config.grpc_health_port, config.metrics_port) == (9002, 9003, 9090)
    assert (config.drain_timeout_s, flags.v) == (30.0, 0)


def test_a_pool_name_is_accepted_with_file_discovery(tmp_path: Path) -> None:
    """With file discovery, --pool-name is accepted and only names the pool in metrics."""
    file = tmp_path / "config.yaml"
    file.write_text(GOOD)
    config, _ = parse_flags(["--config-file", str(file), "--pool-name", "mine", "--pool-namespace", "here"])
    assert (config.pods_file, config.kube, config.pool_name) == (tmp_path / "pods.yaml", None, "mine")
    assert parse_flags(["--config-file", str(file)])[0].pool_name == "default"
    assert parse_flags(["--pool-name", "mine"])[0].pool_name == "mine"
    selected = ["--endpoint-selector", "a=b", "--endpoint-target-ports", "8000"]
    for more in (selected, ["--pool-name", "mine", "--pool-port", "other=9012"]):
        with pytest.raises(ConfigError, match="exactly one of"):
            parse_flags(["--config-file", str(file), *more])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--pool-port", "b=9012", "--endpoint-selector", "a=b"], "give the first one by --pool-name"),
        (["--pool-name", "b", "--pool-port", "b=9012"], "names a pool twice"),
        (["--pool-name", "a", "--pool-port", "b=1", "--pool-port", "b=2"], "names a pool twice"),
    ],
)
def test_wrong_further_pools_are_rejected(argv: list[str], message: str) -> None:
    """A further pool needs a first one and another name."""
    with pytest.raises(ConfigError, match=message):
        parse_flags(argv)


def test_further_pools_have_ports() -> None:
    """--pool-port names further pools, each once, beside that of --pool-name in the cluster."""
    config, _ = parse_flags(["--pool-name", "a", "--pool-port", "b=9012", "--pool-port", "c=9013"])
    assert config.kube is not None
    assert (config.kube.pools, dict(config.kube.more_pools)) == (("a", "b", "c"), {"b": 9012, "c": 9013})


def test_objectives_have_integer_priorities() -> None:
    """--objective reads NAME=PRIORITY with an integer of either sign."""
    config, _ = parse_flags([*PODS, "--objective=batch=-1", "--objective=a=b=7"])
    assert config.priorities == (("batch", -1), ("a=b", 7))
    assert not config.tracing


@pytest.mark.parametrize("objective", ["batch", "=1", "batch=low", "batch=--1", "batch=1.5"])
def test_an_objective_without_a_priority_is_rejected(
    objective: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A value that is not NAME=PRIORITY is rejected with the expected form."""
    with pytest.raises(SystemExit):
        parse_flags([*PODS, f"--objective={objective}"])
    assert "must be NAME=PRIORITY" in capsys.readouterr().err


def test_flags_are_read_with_their_units() -> None:
    """Durations, pairs and choices are parsed to typed settings."""
    config, _ = parse_flags(
        [
            *PODS,
            "--responses=full",
            "--tokenizer=m=/dir",
            "--tokenizer=n=/other",
            "--refresh-metrics-interval=250ms",
            "--drain-timeout=1m30s",
            "--secure-serving=false",
        ]
    )
    assert config.responses_full
    assert dict(config.tokenizers) | {"kvroute-tiny": ""} == {
        "m": "/dir",
        "n": "/other",
        "kvroute-tiny": "",
    }
    assert config.tokenize_deadline_s == 0.05
    assert (config.refresh_interval_s, config.drain_timeout_s) == (0.25, 90.0)


@pytest.mark.parametrize(
    "argv",
    [
        ["--grpc-port", "70000"],
        ["--grpc-port", "-1"],
        ["--max-streams", "0"],
        ["--tokenizer", "m"],
        ["--responses", "some"],
        ["--refresh-metrics-interval", "0s"],
        ["--drain-timeout", "soon"],
        ["--prefill-tokens-per-s", "nan"],
        ["--secure-serving=maybe"],
        ["--no-such-flag"],
    ],
)
def test_an_invalid_flag_is_rejected_by_name(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """An invalid flag ends the process with status 2 and an error that names the flag."""
    with pytest.raises(SystemExit) as caught:
        parse_flags([*PODS, *argv])
    assert caught.value.code == 2
    assert argv[0].partition("=")[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        [],
        [*PODS, "--config-text", GOOD],
        [*PODS, "--secure-serving=false", "--cert-path", "/certificates"],
        [*PODS, "--secure-serving", "--peer", "router-2:9002"],
        [*PODS, "--compat", "off", "--config-text", PICKS],
    ],
)
def test_contradicting_flags_are_rejected(argv: list[str]) -> None:
    """Pods need exactly one source, and TLS settings need TLS."""
    with pytest.raises(ConfigError, match="--"):
        parse_flags(argv)


def test_a_configuration_file_selects_llmd_answers(tmp_path: Path) -> None:
    """With a file, ext_proc answers in llm-d's form and receives responses, unless configured otherwise."""
    path = tmp_path / "config.yaml"
    plain = GOOD.partition("plugins:")[0]
    for text, flags, compat in (
        (plain, [], "answers"),
        (plain + "compat: off\n", [], "off"),
        (plain + "compat: answers\n", ["--compat", "off"], "off"),
    ):
        path.write_text(text)
        config, _ = parse_flags([*PODS, "--config-file", str(path), *flags])
        assert (config.compat, config.responses_full) == (compat, True)
        assert config.picker is not None
        assert not config.picker.picks
    assert not parse_flags([*PODS, "--config-text", plain, "--responses", "skip"])[0].responses_full


def test_a_configuration_file_names_the_pods_file(tmp_path: Path) -> None:
    """File discovery is read from the configuration file; a relative path is resolved against its folder."""
    path = tmp_path / "config.yaml"
    path.write_text(GOOD)
    config, _ = parse_flags(["--config-file", str(path)])
    assert (config.pods_file, config.watch_pods_file) == (tmp_path / "pods.yaml", True)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("llm-d.ai/v1alpha1", "v9", r":1: apiVersion: unknown value 'v9'; expected one of: .*llm-d"),
        ("EndpointPickerConfig", "Pod", r":2: kind: unknown value 'Pod'"),
        (
            "file-discovery",
            "queue-scorer",
            r":11: dataLayer.discovery.pluginRef: queue-scorer cannot discover pods",
        ),
        (
            "watchFile",
            "watchfile",
            r":8: plugins\[0\].parameters.watchfile: unknown field; expected one of: path, watchFile",
        ),
        ("true", "7", r":8: plugins\[0\].parameters.watchFile: must be true or false"),
        ("    path: pods.yaml\n", "", r":7: plugins\[0\].parameters.path: is missing"),
        (
            "pluginRef: pods",
            "pluginRef: podz",
            r":11: dataLayer.discovery.pluginRef: no plugin named 'podz'",
        ),
        ("kind:", "kind: X\nkind:", r":3: kind: given twice"),
        ("dataLayer:", "schedulingProfile: []\ndataLayer:", r":9: schedulingProfile: unknown field"),
        (
            "  discovery:",
            "  peerDiscovery: {}\n  discovery:",
            r":10: dataLayer.peerDiscovery: unsupported field; .* --peer",
        ),
        ("dataLayer:", "featureGates: [magic]\ndataLayer:", r":9: featureGates: unknown gate 'magic'"),
        (
            "dataLayer:",
            "- type: file-discovery\n  name: pods\ndataLayer:",
            r":10: plugins\[1\].name: duplicate plugin",
        ),
        ("dataLayer:", "compat: maybe\ndataLayer:", r":9: compat: unknown value 'maybe'"),
        ("kind:", "&a plugins: [*a]\nkind:", r"not valid YAML|a reference to itself|given twice"),
        ("plugins:\n", "plugins: [\n", r"not valid YAML"),
        (GOOD, "", r":1: the file: must be (?:a mapping|one YAML document)"),
        (GOOD, "- a", r":1: the file: must be (?:a mapping|one YAML document)"),
    ],
)
def test_an_invalid_configuration_is_rejected_with_file_line_and_field(
    tmp_path: Path, old: str, new: str, complaint: str
) -> None:
    """Unknown fields and values are rejected with their location and the allowed ones."""
    path = tmp_path / "config.yaml"
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(ConfigError, match=rf"config\.yaml.*{complaint}"):
        assert parse_config(read_text(path), str(path)).discovery is None


@pytest.mark.parametrize(
    "value",
    ["[" * 5000, "&a [*a]", "[" * 40 + "]" * 40, "\n- &a [1,2,3,4,5,6,7,8]" + _REPEATED],
    ids=["open", "loop", "deep", "bomb"],
)
def test_recursive_or_deep_yaml_is_rejected(tmp_path: Path, value: str) -> None:
    """Deep nesting, references to themselves and exponentially repeated aliases end in an error."""
    path = tmp_path / "config.yaml"
    path.write_text(GOOD.partition("plugins:")[0] + f"plugins: {value}\n")
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        parse_config(read_text(path), str(path))


@given(st.text(max_size=80))
def test_any_configuration_text_is_parsed_or_rejected(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    """Any content of a configuration file is parsed or raises ConfigError."""
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ConfigError):
        parse_config(read_text(path), str(path))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("50ms", 0.05), ("1s", 1.0), ("1m30s", 90.0), ("1.5h", 5400.0), ("2", 2.0), ("0s", 0.0)],
)
def test_durations_in_go_notation_are_parsed(text: str, expected: float) -> None:
    """Go's notation and plain seconds are accepted."""
    assert seconds(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["", "s", "-1", "-1s", "1 s", "1d", "1s1", "١s"])
def test_an_invalid_duration_is_rejected(text: str) -> None:
    """A text that is not a duration raises ValueError."""
    with pytest.raises(ValueError, match="duration"):
        seconds(text)


def test_the_command_prints_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    """Without arguments and with --help every command is listed; --version prints the package's version."""
    assert cli.main([]) == cli.main(["--help"]) == 0
    helped = capsys.readouterr().out
    assert all(f"\n  {name} " in helped for name in ("up", "router", "indexer", "model-server"))
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("kvroute 0.")


def test_an_unknown_command_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the unknown command and the known ones."""
    assert cli.main(["rooter"]) == 2
    assert "rooter; use one of up, router, tokenizer, indexer, model-server" in capsys.readouterr().err


def test_flags_alone_run_the_router(capsys: pytest.CaptureFixture[str]) -> None:
    """The image's arguments may be flags alone, as those of llm-d's picker are."""
    assert cli.main(["--zap-encoder=json"]) == 2
    assert "kvroute router: error: give exactly one of" in capsys.readouterr().err


def test_a_commands_arguments_are_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    """`kvroute router ...` passes its arguments to the router's command line."""
    assert cli.main(["router"]) == 2
    assert "kvroute router: error: give exactly one of" in capsys.readouterr().err


def test_the_router_has_the_indexers_flags() -> None:
    """The flags of `kvroute indexer` set the index of the router."""
    config, _ = parse_flags(
        [
            *PODS,
            "--block-tokens=32",
            "--backend=flat",
            "--capacity-bytes=1000000",
            "--hash-seed=7",
            "--events-bind=tcp://*:5557",
            "--first-sequence=1",
            "--bootstrap-timeout=2.5",
            "--tier-weight=cpu=0.5",
        ]
    )
    index = config.index
    assert (index.block_tokens, index.backend, index.capacity_bytes) == (32, "flat", 1_000_000)
    assert (index.hash_seed, index.events_bind, index.first_sequence) == (7, "tcp://*:5557", 1)
    assert (index.bootstrap_s, index.tier_weights["cpu"]) == (2.5, 0.5)


@pytest.mark.parametrize(
    ("flag", "error"),
    [
        ("--tier-weight=cpu", SystemExit),
        ("--backend=redis", IndexerConfigError),
        ("--events-bind=ipc://x", IndexerConfigError),
    ],
)
def test_an_invalid_index_setting_is_rejected(flag: str, error: type[BaseException]) -> None:
    """An invalid setting of the index ends the router's start like any other invalid flag."""
    with pytest.raises(error):
        parse_flags([*PODS, flag])


@pytest.mark.parametrize("command", ["up", "router", "tokenizer", "indexer", "model-server", "plan"])
def test_an_invalid_flag_is_reported_in_one_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A command's error is one line with a hint, without usage text."""
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--no-such-flag"])
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert line.startswith(f"kvroute {command}: error: ")
    assert line.endswith(f"(see kvroute {command} --help)")
