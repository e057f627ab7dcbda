"""The growth ladder: what each rung serves, and what it needs for a load."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest

from model_server.errors import ConfigError
from model_server.shapes.architectures import decoder_shape
from model_server.shapes.deployment import Budget, Deployment
from planning.cli import main
from planning.ladder import Load, Rung, ladder
from planning.presets import GPUS, find_model

LOAD = Load(requests_per_s=50.0, prompt_tokens=4096, output_tokens=256, reused_share=0.7)
H100 = GPUS["h100"]


def rungs(load: Load = LOAD, model: str = "qwen3-8b") -> list[Rung]:
    """Return the ladder of a model on H100s."""
    deployment = Deployment(
        decoder_shape(find_model(model)),
        weight_bytes=2,
        fp8_kv=False,
        tensor_parallel=1,
        block_tokens=16,
        chunk_tokens=2048,
    )
    return list(ladder(deployment, H100, Budget(H100.memory_bytes, 0.9, 2 * 10**9), load))


def test_each_rung_serves_at_least_what_the_one_before_does() -> None:
    """More memory, fp8 KV and more GPUs hold more sequences; each number of pods serves the load."""
    given = rungs()
    for before, after in pairwise(given[:5]):
        assert after.sequences >= before.sequences
        assert after.replicas * after.gpus <= before.replicas * before.gpus
    assert all(rung.replicas * rung.requests_per_s >= LOAD.requests_per_s * 0.999 for rung in given)


def test_the_number_of_pods_is_the_smallest() -> None:
    """A load just above what the pods of a rung serve needs one more; just below, no more."""
    for share in (0.0, 0.5, 0.9):
        first = rungs(replace(LOAD, reused_share=share))[0]
        served_per_s = first.replicas * first.requests_per_s
        for factor, more in ((0.999, 0), (1.001, 1)):
            load = replace(LOAD, reused_share=share, requests_per_s=served_per_s * factor)
            assert rungs(load)[0].replicas == first.replicas + more


def test_prefix_routing_computes_only_what_is_new() -> None:
    """With prefix routing the time to first token is that of the part of the prompt that is not reused."""
    alone, routed = rungs()[3], rungs()[4]
    assert routed.ttft_s < alone.ttft_s
    assert rungs(replace(LOAD, reused_share=0.0))[4].ttft_s == pytest.approx(
        rungs(replace(LOAD, reused_share=0.0))[3].ttft_s
    )


def test_a_model_that_does_not_fit_climbs_until_it_does() -> None:
    """Rungs below the first that holds a sequence have no pods."""
    given = rungs(model="qwen3-32b")
    assert [bool(rung.sequences) == bool(rung.replicas) for rung in given] == [True] * len(given)
    assert given[3].sequences > 0


def test_a_huge_load_is_planned_at_once() -> None:
    """The number of pods is searched, not counted up."""
    assert rungs(replace(LOAD, requests_per_s=1e12))[0].replicas > 10**9


def test_a_load_longer_than_the_models_context_is_rejected() -> None:
    """The error names the flags."""
    with pytest.raises(ConfigError, match="--prompt-tokens"):
        rungs(replace(LOAD, prompt_tokens=1_000_000))


def test_the_command_prints_the_ladder_for_a_load(capsys: pytest.CaptureFixture[str]) -> None:
    """With --requests-per-s each rung is printed with what is seen before it and how to climb."""
    arguments = ["--model", "qwen3-8b", "--requests-per-s", "50"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert text.count("seen before:") == text.count("climb:") == 5
    assert main([*arguments, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [rung["name"] for rung in record["ladder"]][-1] == "disaggregation"
    assert main(["--model", "qwen3-8b"]) == 0
    assert "ladder" not in capsys.readouterr().out
