"""Command line of the model server: flags, one-line errors, late imports."""

from __future__ import annotations

import subprocess
import sys
from argparse import ArgumentParser
from dataclasses import fields

import pytest

from common.flags import add_flags, flag_values
from model_server import cli
from model_server.config import EngineConfig, KVEventsConfig


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--port", "70000"], "must be a whole number from 0 to 65535"),
        (["--block-size", "0"], "block_tokens is 0"),
        (["--tensor-parallel-size", "0"], "tensor_parallel_size is 0"),
        (["--dtype", "int3"], "invalid choice: 'int3'"),
        (["--kv-cache-dtype", "fp4"], "invalid choice: 'fp4'"),
        (["--max-loras", "-1"], "max_loras is -1; it must be at least 0"),
        (["--max-body-bytes", "0"], "must be a whole number from 1"),
        (["--admin-port", "70000"], "must be a whole number from 0 to 65535"),
        (["--port", "8000", "--admin-port", "8000"], "--admin-port 8000: is the serving port"),
        (["--admin-token-file", "/dev/null"], "--admin-token-file: needs --admin-port"),
        (
            ["--admin-port", "1", "--admin-token-file", "/dev/null"],
            "/dev/null: must contain one line of 1 to",
        ),
        (["--admin-port", "1", "--admin-token-file", "/none"], "/none: cannot be read"),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["--max-num-seqs", "64", "--max-num-batched-tokens", "8"], "max_num_batched_tokens"),
        (["--kv-events-config", "{"], "--kv-events-config: Input data was truncated"),
        (["--kv-events-config", "[]"], "--kv-events-config: Expected `object`, got `array`"),
        (["--kv-events-config", '{"hwm": "9"}'], "Expected `int`, got `str` - at `$.hwm`"),
        (["--kv-events-config", '{"port": 1}'], "--kv-events-config: unknown setting port"),
        (["--kv-events-config", '{"publisher": "nats"}'], "--kv-events-config: Invalid enum value 'nats'"),
        (["--kv-events-config", "{}", "--kv-events-bind"], "replaces the other flags of KV events"),
        (["--kv-events-config", "{}", "--no-kv-events"], "replaces the other flags of KV events"),
    ],
)
def test_a_wrong_flag_is_one_line(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong flag gives exit code 2 and one line on stderr that names it."""
    with pytest.raises(SystemExit) as caught:
        cli.main(flags)
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1


def test_flags_are_the_settings() -> None:
    """Defaults are the settings' own; each flag, by any of its names, sets its field."""
    parser = ArgumentParser()
    add_flags(parser, EngineConfig)

    def read(*flags: str) -> EngineConfig:
        return EngineConfig(**flag_values(EngineConfig, parser.parse_args(flags)))

    assert read() == EngineConfig()
    assert {field.name for field in fields(EngineConfig)} == set(vars(parser.parse_args([])))
    got = read(
        "--gpu-blocks", "7", "--no-enable-prefix-caching", "--cpu-gib", "0.5", "-tp", "2", "--seed", "3"
    )
    assert got == EngineConfig(
        gpu_blocks=7, enable_prefix_caching=False, cpu_gib=0.5, tensor_parallel_size=2, seed=3
    )
    assert read("--num-gpu-blocks-override", "7") == read("--num-gpu-blocks", "7")


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("{}", None),
        ('{"enable_kv_cache_events": true, "publisher": "null"}', None),
        ('{"enable_kv_cache_events": true}', KVEventsConfig()),
        (
            '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:1", "topic": "t", '
            '"replay_endpoint": "tcp://*:2", "buffer_steps": 3, "hwm": 4, "max_queue_size": 5}',
            KVEventsConfig("tcp://*:1", "tcp://*:2", 3, 4, 5, "t"),
        ),
    ],
)
def test_vllms_events_config(text: str, config: KVEventsConfig | None) -> None:
    """The JSON object of vLLM's --kv-events-config has vLLM's defaults: no events, no replay."""
    assert KVEventsConfig.of_vllm(text) == config


def test_help_imports_no_heavy_package() -> None:
    """--help imports neither torch, the web server nor ZMQ."""
    script = (
        "import sys; from model_server.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'uvicorn', 'starlette', 'zmq', 'tokenizers'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "--kv-events-endpoint" in result.stdout
    assert result.stdout.splitlines()[-1] == "[]"


def test_a_missing_package_names_the_extra() -> None:
    """A missing dependency is reported with the extra to install, without a traceback."""
    script = "import sys; sys.modules['uvloop'] = None; from model_server.cli import main; sys.exit(main([]))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr == (
        "kvroute model-server: error: uvloop is not installed; install kvroute[model-server]\n"
    )
