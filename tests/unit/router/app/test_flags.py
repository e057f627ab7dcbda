"""Flags of llm-d's endpoint picker: implemented, without effect, or rejected with a reason."""

from __future__ import annotations

import logging
import re
import ssl
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from indexer import IndexerConfig
from router.app.config import RouterConfig, config_as_yaml, parse_flags
from router.app.process import JsonFormatter
from router.app.server import main
from router.app.tls import MetricsTlsOptions, TlsOptions
from router.config.flags import ignored_flags
from router.errors import ConfigError
from tests.support.paths import ROOT

PODS = ["--pods-file", "/pods.yaml"]

DONE = {
    "--grpc-port=1": ("grpc_port", 1),
    "--grpc-health-port=2": ("grpc_health_port", 2),
    "--metrics-port=3": ("metrics_port", 3),
    "--refresh-metrics-interval=50ms": ("refresh_interval_s", 0.05),
    "--metrics-staleness-threshold=2s": ("load_age_max_s", 2.0),
    "--secure-serving": ("tls", TlsOptions(plaintext=False)),
    "--secure-serving=false": ("tls", None),
    "--metrics-endpoint-auth=true": ("metrics_auth", True),
    "--metrics-cert-dir=/m": ("metrics_tls", MetricsTlsOptions(Path("/m"))),
    "--drain-timeout=1m": ("drain_timeout_s", 60.0),
    "--grpc-max-recv-msg-size=10MiB": ("receive_bytes_max", 10 << 20),
    "--grpc-max-send-msg-size=25MB": ("send_bytes_max", 25_000_000),
    "--tracing": ("tracing", True),
    "--enable-pprof=0": ("profiling", False),
    "--enable-grpc-stream-metrics": ("stream_metrics", True),
    "--emit-endpoint-scores": ("emit_endpoint_scores", True),
    "--disable-endpoint-subset-filter": ("subset_filter", False),
}
TAKEN = (
    "--allow-experimental-plugins",
    "--ha-enable-leader-election",
    "--health-checking",
    "--refresh-prometheus-metrics-interval=5s",
    "--zap-devel=true",
    "--zap-stacktrace-level=error",
    "--zap-time-encoding=rfc3339",
)
REFUSED = (
    "--total-queued-requests-metric=a",
    "--total-running-requests-metric=a",
    "--kv-cache-usage-percentage-metric=a",
    "--lora-info-metric=a",
    "--cache-info-metric=a",
)
OTHERS = (
    "--pool-name",
    "--pool-namespace",
    "--pool-group",
    "--endpoint-selector",
    "--endpoint-target-ports",
    "--config-file",
    "--config-text",
    "--cert-path",
    "--enable-cert-reload",
    "--tls-min-version",
    "--tls-cipher-suites",
    "--metrics-client-ca-file",
    "--zap-log-level",
    "--zap-encoder",
    "-v",
    "--v",
)
REFERENCE = ROOT.parent / "shared" / "reference" / "endpoint-picker.md"


@pytest.mark.parametrize("flag", DONE)
def test_a_flag_of_the_reference_gives_its_setting(flag: str) -> None:
    """A flag of llm-d's picker has the same name and value syntax here."""
    config, _ = parse_flags([*PODS, flag])
    name, value = DONE[flag]
    assert getattr(config, name) == value


@pytest.mark.parametrize("flag", TAKEN)
def test_a_flag_without_effect_is_accepted_and_logged(flag: str) -> None:
    """A flag that has no effect here is accepted, and the log says why."""
    config, flags = parse_flags([*PODS, flag])
    assert config == RouterConfig(pods_file=Path("/pods.yaml"))
    (line,) = ignored_flags(flags)
    assert line.startswith(f"{flag.partition('=')[0]}={flag.partition('=')[2] or 'true'}: not needed here: ")


@pytest.mark.parametrize("flag", REFUSED)
def test_an_old_metric_flag_is_rejected(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Flags for metric names are rejected with a hint at the label llm-d.ai/engine-type."""
    with pytest.raises(SystemExit):
        parse_flags([*PODS, flag])
    assert "llm-d.ai/engine-type" in capsys.readouterr().err


@pytest.mark.parametrize("flag", [*OTHERS, *(name.partition("=")[0] for name in (*DONE, *TAKEN))])
def test_all_flags_of_the_reference_are_known(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The help lists every flag of llm-d's picker."""
    with pytest.raises(SystemExit):
        parse_flags(["--help"])
    assert f"{flag} " in capsys.readouterr().out.replace(",", " ").replace("\n", " \n")


def test_the_table_of_the_docs_lists_each_flag_of_the_reference() -> None:
    """Each flag that is known here or named by the facts about the reference has a row in the table."""
    page = (ROOT / "docs" / "configuration.md").read_text()
    rows = page.partition("## Flags of the reference")[2].partition("`--max-streams`")[0]
    first_columns = "".join(line.split("|")[1] for line in rows.splitlines() if line.startswith("|"))
    told = set(re.findall(r"`(-[a-z-]+)`", first_columns))
    known = {name.partition("=")[0] for name in (*DONE, *TAKEN, *REFUSED, *OTHERS)}
    assert known == told
    if not REFERENCE.exists():
        pytest.skip(f"{REFERENCE} with the reference's flags is not here")
    facts = REFERENCE.read_text().partition("## 7. Flags")[2].partition("Exactly one of")[0]
    facts = facts.replace(
        "--grpc-max-{recv,send}-msg-size", "--grpc-max-recv-msg-size --grpc-max-send-msg-size"
    )
    assert set(re.findall(r"--[a-z]+(?:-[a-z]+)+", facts)) <= known


def test_flag_prefixes_are_not_expanded() -> None:
    """An abbreviated flag is rejected, because a later version may have another flag with that prefix."""
    with pytest.raises(SystemExit):
        parse_flags([*PODS, "--secure"])


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--cert-path=/c"], "--cert-path: needs TLS"),
        (["--metrics-client-ca-file=/c"], "--metrics-client-ca-file: needs --metrics-cert-dir"),
        (["--tls-min-version=VersionTLS10"], "VersionTLS13, 1.3, got 'VersionTLS10'"),
        (["--tls-cipher-suites=TLS_X"], "TLS_RSA_WITH_AES_256_GCM_SHA384, got 'TLS_X'"),
    ],
)
def test_tls_flags_without_effect_are_rejected(
    flags: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A TLS flag that could not be enforced ends the start with advice."""
    with pytest.raises((ConfigError, SystemExit)) as refused:
        parse_flags([*PODS, "--secure-serving=false", *flags])
    assert problem in f"{refused.value} {capsys.readouterr().err}"


def test_tls_bounds_are_read() -> None:
    """Go's names of versions and cipher suites become OpenSSL's; TLS 1.3 suites are always enabled."""
    suites = "TLS_AES_128_GCM_SHA256,TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,TLS_RSA_WITH_AES_128_GCM_SHA256"
    argv = ["--tls-min-version=VersionTLS13", f"--tls-cipher-suites={suites}"]
    config, _ = parse_flags([*PODS, *argv])
    assert config.tls == TlsOptions(
        least_version=ssl.TLSVersion.TLSv1_3, suites=("ECDHE-RSA-AES128-GCM-SHA256", "AES128-GCM-SHA256")
    )


@pytest.mark.parametrize("size", ["0", "-1", "3GiB", "1.5Mi", "ten", ""])
def test_an_invalid_size_is_rejected(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A gRPC message limit must be from 1 to 2^31 - 1 bytes."""
    with pytest.raises(SystemExit):
        parse_flags([*PODS, f"--grpc-max-recv-msg-size={size}"])
    assert "must be a size below 2GiB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("debug", logging.DEBUG),
        ("INFO", logging.INFO),
        ("error", logging.ERROR),
        ("0", logging.INFO),
        ("4", 10),
    ],
)
def test_log_levels_have_zaps_names(level: str, expected: int) -> None:
    """A level is given by zap's name in any case, or as a verbosity."""
    assert parse_flags([*PODS, f"--zap-log-level={level}"])[1].zap_log_level == expected


def test_a_log_line_is_one_json_object() -> None:
    """Line breaks, quotes and stack traces are escaped within one JSON object per line."""
    try:
        raise ValueError('a\n"b"')
    except ValueError as error:
        info = (ValueError, error, error.__traceback__)
    record = logging.LogRecord("n", logging.WARNING, "f", 1, 'said %s\n"', ("x",), info)
    line = JsonFormatter().format(record)
    told = yaml.safe_load(line)
    assert "\n" not in line
    assert (told["level"], told["logger"], told["msg"]) == ("warning", "n", 'said x\n"')
    assert 'ValueError: a\n"b"' in told["stacktrace"]


def test_the_effective_configuration_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--print-config prints defaults, flags and file together, with units, and exits."""
    config = tmp_path / "c.yaml"
    config.write_text(
        "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nfeatureGates: [flowControl]\n"
        "plugins: [{type: queue-scorer}, {type: prefix-cache-scorer, parameters: {matchLengthWeight: 0.5}}]\n"
        "schedulingProfiles: [{name: default, plugins: [{pluginRef: queue-scorer, weight: 2}]}]\n"
        "flowControl: {defaultRequestTTL: 5s}\n"
    )
    assert (
        main(["--pods-file=/pods.yaml", f"--config-file={config}", "--drain-timeout=90s", "--print-config"])
        == 0
    )
    told = yaml.safe_load(capsys.readouterr().out)
    assert told["drain_timeout_s"] == "90 s"
    assert told["max_request_bytes"] == f"{8 << 20} bytes"
    assert told["prefill_tokens_per_s"] == "15000 tokens/s"
    assert told["index"]["block_tokens"] == "16 tokens"
    assert told["index"]["capacity_blocks"] == "8000000 blocks"
    assert told["index"]["capacity_bytes"] == f"{512 << 20} bytes"
    assert told.keys() == {field.name for field in fields(RouterConfig)}
    assert told["compat"] == "answers"
    assert told["picker"]["feature_gates"]["flowControl"] is True
    assert told["picker"]["plugins"][1]["parameters"] == {"matchLengthWeight": 0.5}
    assert told["picker"]["schedulingProfiles"][0]["plugins"] == [{"pluginRef": "queue-scorer", "weight": 2}]
    assert told["picker"]["flowControl"] == {"defaultRequestTTL": "5s"}


def test_a_password_is_not_printed() -> None:
    """--print-config hides the address of a shared index, which may contain a password."""
    index = IndexerConfig(backend="redis", redis_url="redis://:secret@host", hash_seed=1)
    printed = config_as_yaml(RouterConfig(pods_file=Path("/p"), index=index))
    assert "secret" not in printed
    assert yaml.safe_load(printed)["index"]["redis_url"] == "<hidden>"
