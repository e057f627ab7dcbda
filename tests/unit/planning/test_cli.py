"""`kvroute plan`: text and JSON reports, and errors of one line with exit status 2."""

from __future__ import annotations

import json

import pytest

from planning.cli import main
from planning.presets import GPUS, PRESETS


def test_the_page_has_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    """The text report has aligned tables of memory, KV, decode steps, GPUs and preemption."""
    assert main(["--model", "qwen3-8b", "--gpu", "h100", "--batch", "10"]) == 0
    page = capsys.readouterr().out
    lines = page.splitlines()
    assert "  KV pool  53.6  22,726 blocks of 16 tokens" in lines
    assert "      36       1  all tokens      147,456  1.21 GB" in lines
    assert "Concurrency: 44 sequences of 8,192 tokens. Longest single sequence: 40,960 tokens." in lines
    assert "      1     4.88       205  205.0  weights bandwidth" in lines
    assert "     10     8.12     1,231  123.1  weights bandwidth" in lines
    assert "     44    20.38     2,159   49.1  KV bandwidth" in lines
    assert any(line.startswith("Advice: 1, the smallest that fits") for line in lines)
    assert any(line.startswith("Advice: --preemption-mode swap; ") for line in lines)
    assert all(line == line.rstrip() for line in lines)


def test_layers_are_summed_up_by_window(capsys: pytest.CaptureFixture[str]) -> None:
    """A hybrid model's groups are summed up by their window."""
    assert main(["--model", "gemma-3-1b", "--gpu", "l4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    kept = [line.split() for line in lines if "tokens  " in line and "GB" not in line]
    assert [(words[0], words[1]) for words in kept] == [("22", "6"), ("4", "1")]


def test_a_model_that_does_not_fit_is_one_line_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers of GPUs that do not fit the model are listed as such."""
    assert main(["--model", "llama-3.3-70b", "--tp", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.endswith("does not fit")] == ["1", "2"]


def test_json_is_one_object_with_units(capsys: pytest.CaptureFixture[str]) -> None:
    """--json prints the plan as one JSON object."""
    assert main(["--model", "qwen3-8b", "--kv-dtype", "fp8", "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    record = json.loads(out)
    assert record["max_sequences"] == 88
    assert record["kv_cache_dtype"] == "fp8"
    assert record["decode"][-1]["batch"] == 88
    assert [option["tensor_parallel"] for option in record["tensor_parallel_options"]] == [1, 2, 4, 8]


def test_a_gpu_can_be_described(capsys: pytest.CaptureFixture[str]) -> None:
    """Flags describe a custom GPU or override figures of a preset."""
    h100 = ["--hbm-gib", str(80e9 / 2**30), "--hbm-gb-per-s", "3350", "--tflops", "989"]
    records = []
    for flags in (["--gpu", "custom", *h100], ["--gpu", "h100"], ["--gpu", "h100", "--hbm-gib", "40"]):
        assert main(["--model", "qwen3-8b", "--json", *flags]) == 0
        records.append(json.loads(capsys.readouterr().out))
    custom, preset, half = records
    assert {**custom, "gpu": ""} == {**preset, "gpu": ""}
    assert half["gpu_memory_bytes"] == 40 * 2**30
    assert half["decode"][0] == preset["decode"][0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "qwen3-8b", "--batch", "45"], "a batch of 45 exceeds the capacity"),
        (["--model", "llama-3.3-70b"], "does not fit at tensor parallel 1"),
        (["--model", "llama-3.3-70b", "--gpu", "l4", "--dtype", "float32"], "use GPUs with more memory"),
        (["--model", "no-such-model"], "neither a model directory nor one of"),
        (["--model", "qwen3-8b", "--gpu", "custom"], "needs --hbm-gib, --hbm-gb-per-s, --tflops"),
        (["--model", "qwen3-8b", "--tp", "3"], "use one of 1, 2, 4"),
        (["--model", "qwen3-8b", "--context", "50000"], "supports 1 to 40,960"),
        (["--model", "qwen3-8b", "--efficiency", "1.5"], "must be above 0, at most 1"),
        (["--model", "qwen3-8b", "--gpu-memory-utilization", "nan"], "must be above 0, at most 1"),
    ],
)
def test_an_impossible_plan_is_one_line(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An impossible plan ends with one line and exit status 2."""
    assert main(flags) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("flags", [["--batch", "0"], ["--hbm-gib", "inf"], ["--reserve-gb", "nan"], []])
def test_a_wrong_flag_is_one_line(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """An invalid flag ends with one line and exit status 2."""
    model = ["--model", "qwen3-8b"] if flags else []
    with pytest.raises(SystemExit) as caught:
        main([*model, *flags])
    assert caught.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("model", PRESETS)
def test_every_preset_ends_in_a_plan_or_a_reason(
    model: str, gpu: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every preset model on every preset GPU gives a plan, or an error with its reason."""
    status = main(["--model", model, "--gpu", gpu])
    out, err = capsys.readouterr()
    assert (status, bool(out), bool(err)) in ((0, True, False), (2, False, True))
