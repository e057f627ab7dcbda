"""The measurements for a GPU run in tiny sizes on a CPU; their figures are not tested."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_first_look
from benchmarks.gpu_first_look import STEPS, Step, run_step
from benchmarks.roofline import prefill_flops
from benchmarks.roofs import roof_of
from model_server.shapes.architectures import decoder_shape
from planning.presets import GPUS, find_model

_LONGEST_STEP_S = 600


def _main(monkeypatch: pytest.MonkeyPatch, *argv: object) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu_first_look", *map(str, argv)])
    return gpu_first_look.main()


@pytest.mark.timeout(1800)
def test_every_step_that_needs_no_card_gives_figures_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--device cpu --quick` runs all steps that need no card, and writes and prints their figures."""
    assert _main(monkeypatch, tmp_path, "--device", "cpu", "--quick") == 0, capsys.readouterr().out
    wanted = [step.name for step in STEPS if not step.needs_cuda]
    ended = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [(end["step"], end["status"]) for end in ended] == [(name, "passed") for name in wanted]
    table = capsys.readouterr().out
    for name in wanted:
        figures = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        assert figures
        assert all(figure["unit"] and figure["name"] in table for figure in figures)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_card_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a CUDA device the exit status is 2, and stderr says how to see the steps run."""
    assert _main(monkeypatch, tmp_path / "results") == 2
    assert "--device cpu --quick" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


def test_a_step_that_fails_or_is_too_slow_is_reported(tmp_path: Path) -> None:
    """A failed step and one above its timeout end with their status, so that the next step can run."""
    options = [str(tmp_path / "no-checkpoint"), "--device", "cpu", "--quick"]
    assert run_step(Step("decode", _LONGEST_STEP_S), options, tmp_path).status == "failed"
    assert "config.json: the file is missing" in (tmp_path / "decode.log").read_text()
    assert run_step(Step("card", 0), options, tmp_path).status == "timeout"


def test_no_step_takes_more_than_ten_minutes() -> None:
    """Each step has a timeout of at most ten minutes."""
    assert all(0 < step.timeout_s <= _LONGEST_STEP_S for step in STEPS)


def test_known_cards_have_the_roofs_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shares of a known card relate to the data sheet that the plan uses."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    assert roof_of(torch.device("cuda")) == GPUS["h100"]


def test_mfu_counts_only_needed_operations() -> None:
    """A prompt's operations are those of all projections, of causal attention and of one row of logits."""
    shape = decoder_shape(find_model("llama-3.1-8b"))
    linear = 32 * (4096 * (4096 + 1024) * 2 + 3 * 4096 * 14_336)
    attention = 32 * 4 * 4096 * (2048 * 2049 // 2)
    assert prefill_flops(shape, 2048) == 2 * 2048 * linear + attention + 2 * 4096 * 128_256
