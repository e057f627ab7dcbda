"""planning.plan: sizes equal those of real models and pools, figures equal published ones."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from model_server.attention import KvLayout, new_attention
from model_server.errors import CapacityError, ConfigError, ModelError
from model_server.shapes.architectures import decoder_shape
from model_server.shapes.deployment import Budget, Deployment, Pool
from model_server.worker.block_copies import bytes_of_block
from planning.plan import Plan, make_plan
from planning.presets import GPUS, PRESETS, find_model

H100, H200 = GPUS["h100"], GPUS["h200"]
CONTEXT_TOKENS = 8192
# A budget with nearly all memory and no reserve.
GENEROUS = {"utilization": 0.95, "reserve_bytes": 0}
QWEN, LLAMA_70B = "qwen3-8b", "llama-3.3-70b"


def deployed(name: str, **settings: object) -> Deployment:
    """Return the deployment of a preset."""
    return Deployment(decoder_shape(PRESETS[name]), **settings)  # type: ignore[arg-type]


def planned(name: str, *, batch: int | None = None, budget: Budget | None = None, **settings: object) -> Plan:
    """Return the plan of a preset on H100s."""
    deployment = deployed(name, **settings)
    return make_plan(name, deployment, H100, budget or Budget(H100.memory_bytes), CONTEXT_TOKENS, batch)


def test_an_8_billion_model_on_one_gpu() -> None:
    """Qwen3-8B on an H100 at 8k tokens: 147,456 bytes per token, 44 sequences, 205 to 2,159 tokens/s."""
    plan = planned(QWEN)
    assert plan.pool.deployment.token_bytes == 147_456
    assert plan.sequences == 44
    first, last = plan.steps[0], plan.steps[-1]
    assert (first.batch, round(first.tokens_per_s), first.bound) == (1, 205, "weights bandwidth")
    assert (last.batch, round(last.tokens_per_s), last.bound) == (44, 2159, "KV bandwidth")


def test_8_bit_kv_holds_twice_the_sequences() -> None:
    """Qwen3-8B with fp8 KV fits 88 sequences; each block also has its scales."""
    plan = planned(QWEN, fp8_kv=True)
    assert plan.sequences == 88
    assert plan.pool.deployment.token_bytes == 147_456 / 2 + 36 * 8 * 2 * 4 / 16


def test_a_70_billion_model_needs_four_gpus() -> None:
    """Llama 70B on H100s at 8k tokens fits no sequence at 1 and 2 GPUs, 4 at 2 with all memory, 51 at 4."""
    for size in (1, 2):
        with pytest.raises(CapacityError, match=f"does not fit at tensor parallel {size}: .* from --tp 4"):
            planned(LLAMA_70B, tensor_parallel=size)
    generous = Budget(H100.memory_bytes, **GENEROUS)  # type: ignore[arg-type]
    assert planned(LLAMA_70B, tensor_parallel=2, budget=generous).sequences == 4
    plan = planned(LLAMA_70B, tensor_parallel=4)
    assert plan.sequences == 51
    assert plan.advised is not None
    assert plan.advised.deployment.tensor_parallel == 4


def test_tight_headroom_is_advised_against() -> None:
    """If weights leave hardly any room for KV, the plan recommends twice the GPUs."""
    plan = planned(LLAMA_70B, tensor_parallel=2, budget=Budget(H100.memory_bytes, **GENEROUS))  # type: ignore[arg-type]
    assert plan.pool.headroom < 0.1
    assert plan.advised is not None
    assert plan.advised.deployment.tensor_parallel == 4


def test_the_roof_of_a_larger_gpu() -> None:
    """Llama-3-8B on an H200 at 0.92, 1k tokens: 53,243 blocks, 317 tokens/s alone, 24,890 at batch 256."""
    budget = Budget(H200.memory_bytes, utilization=0.92)
    plan = make_plan("llama", deployed("llama-3.1-8b"), H200, budget, 1024)
    rates = {step.batch: round(step.tokens_per_s) for step in plan.steps}
    assert plan.pool.blocks == 53_243
    assert {size: rates[size] for size in (1, 8, 32, 128, 256)} == {
        1: 317,
        8: 2388,
        32: 7957,
        128: 19087,
        256: 24890,
    }


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", [QWEN, "qwen3-0.6b"])
def test_a_step_reads_no_untied_input_embedding(name: str, size: int) -> None:
    """Weights that a step reads are all but an input embedding of its own, which takes memory only."""
    deployment = deployed(name, tensor_parallel=size)
    shape = deployment.shape
    embedding = 0 if shape.tied_embeddings else shape.vocab_size * shape.hidden
    assert (embedding == 0) == (name == "qwen3-0.6b")
    assert deployment.gpu_weights_bytes - deployment.gpu_read_weights_bytes == 2 * embedding // size
    step = make_plan(name, deployment, H100, Budget(H100.memory_bytes), 16).steps[0]
    assert step.weights_s == deployment.gpu_read_weights_bytes / H100.memory_bytes_per_s
    assert 0 <= step.compute_s * H100.flops_per_s - 2 * (deployment.parameters - embedding) / size < 1e8


def test_short_contexts_are_bound_by_arithmetic() -> None:
    """With little KV, a batch beyond the GPU's operations per byte is bound by compute."""
    plan = make_plan("llama", deployed("llama-3.1-8b"), H200, Budget(H200.memory_bytes), 16)
    assert plan.steps[0].bound == "weights bandwidth"
    assert plan.steps[-1].bound == "compute"
    assert plan.steps[-1].step_s == plan.steps[-1].compute_s


def test_a_batch_above_the_capacity_is_rejected() -> None:
    """A batch at the capacity is planned; one more is rejected with alternatives."""
    assert 44 in [step.batch for step in planned(QWEN, batch=44).steps]
    with pytest.raises(CapacityError, match=r"batch of 45 .* holds 44 sequences of 8,192 tokens; .*fp8"):
        planned(QWEN, batch=45)


def test_a_context_above_the_capacity_is_rejected() -> None:
    """If the weights fit but no sequence does, the error states the longest possible sequence."""
    budget = Budget(H100.memory_bytes, utilization=0.24)
    with pytest.raises(CapacityError, match=r"no sequence of 8,192 tokens fits: .* enough for 5,536 tokens"):
        planned(QWEN, budget=budget)
    with pytest.raises(ConfigError, match="supports 1 to 40,960"):
        make_plan("q", deployed(QWEN), H100, Budget(H100.memory_bytes), 40_961)


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "kvroute-tiny"])
def test_parameters_are_those_of_the_model(name: str) -> None:
    """Each preset has as many parameters as the transformers model of the same configuration."""
    values = dict(PRESETS[name].values)
    model_class = getattr(transformers, values.pop("architectures")[0])  # type: ignore[index]
    with torch.device("meta"):
        model = model_class(model_class.config_class(**values))
    assert deployed(name).parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("name", ["kvroute-tiny", "gemma-3-1b", "qwen3-0.6b"])
def test_a_block_is_as_large_as_the_pools(name: str, fp8: bool) -> None:
    """A planned block has as many bytes as a block of the engine's pool, for all layouts and KV types."""
    deployment = deployed(name, fp8_kv=fp8)
    layout = KvLayout(deployment.groups, num_blocks=3, block_tokens=16)
    shape, cpu = deployment.shape, torch.device("cpu")
    pool = new_attention(shape, layout, torch.bfloat16, cpu, fp8=fp8)
    assert deployment.gpu_block_bytes == bytes_of_block(pool.block_tensors())


@pytest.mark.parametrize("size", [2, 4, 8])
def test_gpus_share_the_weights(size: int) -> None:
    """All GPUs together store all weights once, except norms, which each GPU stores."""
    one, many = deployed(QWEN), deployed(QWEN, tensor_parallel=size)
    norms = one.shape.layers * (2 * 4096 + 2 * 128) + 4096
    assert size * many.gpu_weights_bytes == one.gpu_weights_bytes + 2 * (size - 1) * norms


@pytest.mark.parametrize(("size", "copies"), [(2, 1), (8, 1), (16, 2), (32, 4)])
def test_gpus_share_the_heads(size: int, copies: int) -> None:
    """KV heads are divided among GPUs, and replicated if there are fewer heads than GPUs."""
    assert deployed(QWEN, tensor_parallel=size).token_bytes == copies * deployed(QWEN).token_bytes


def test_windows_bound_the_kv_of_a_sequence() -> None:
    """In a hybrid model only full-attention layers keep and read more KV for a longer sequence."""
    short, long = 8192, 32_768
    deployment = deployed("gemma-3-1b")
    full = deployment.decoding_blocks(long) - deployment.decoding_blocks(short)
    assert full == (long - short) // 16
    assert deployment.gpu_kv_read_bytes(long) - deployment.gpu_kv_read_bytes(short) == 4 * 1024 * (
        long - short
    )


@settings(deadline=None)
@given(st.sampled_from([QWEN, "gemma-3-1b"]), st.integers(0, 5000), st.integers(1, 3000))
def test_the_ceiling_is_exact(name: str, blocks: int, context_tokens: int) -> None:
    """The planned number of sequences fits, one of them in its prefill, and one more does not."""
    deployment = deployed(name, chunk_tokens=256)
    most = deployment.sequences(blocks, context_tokens)

    def needed(sequences: int) -> int:
        first = deployment.prefilling_blocks(context_tokens)
        return first + (sequences - 1) * deployment.decoding_blocks(context_tokens)

    assert not most or needed(most) <= blocks
    assert needed(most + 1) > blocks


def test_a_faster_link_makes_swapping_worth_it() -> None:
    """Recompute is recommended below the break-even link speed, swap above it."""
    plan = planned(QWEN)
    even = plan.preemption.even_link_bytes_per_s
    budget = Budget(H100.memory_bytes)
    modes = [
        make_plan(
            QWEN, deployed(QWEN), replace(H100, link_bytes_per_s=even * factor), budget, CONTEXT_TOKENS
        ).preemption.mode
        for factor in (0.99, 1.01)
    ]
    assert modes == ["recompute", "swap"]


def test_half_the_efficiency_takes_twice_the_time() -> None:
    """Efficiency scales all speeds and no sizes."""
    half = make_plan(QWEN, deployed(QWEN), H100.at(0.5), Budget(H100.memory_bytes), CONTEXT_TOKENS)
    full = planned(QWEN)
    assert half.sequences == full.sequences
    assert half.steps[0].step_s == pytest.approx(2 * full.steps[0].step_s)
    assert half.preemption.even_link_bytes_per_s == pytest.approx(full.preemption.even_link_bytes_per_s / 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"utilization": 0.0}, "must be above 0, at most 1"),
        ({"utilization": 1.1}, "must be above 0, at most 1"),
        ({"utilization": 0.01}, "leaves nothing"),
        ({"reserve_bytes": -1}, "leaves nothing"),
    ],
)
def test_an_empty_budget_is_rejected(settings: dict[str, float], message: str) -> None:
    """A budget without usable memory is a ConfigError."""
    with pytest.raises(ConfigError, match=message):
        Budget(H100.memory_bytes, **settings)  # type: ignore[arg-type]


def test_heads_that_do_not_divide_are_rejected() -> None:
    """A tensor parallel size that the engine rejects is rejected by the plan."""
    with pytest.raises(ConfigError, match="use one of 1, 2, 4"):
        deployed(QWEN, tensor_parallel=3)


def test_a_directory_is_read_like_a_preset(tmp_path: Path) -> None:
    """A checkpoint directory is planned by its config.json; an unknown name lists the presets."""
    (tmp_path / "config.json").write_text(json.dumps(PRESETS[QWEN].values))
    assert decoder_shape(find_model(str(tmp_path))) == decoder_shape(PRESETS[QWEN])
    assert find_model("Qwen3-8B") is PRESETS[QWEN]
    with pytest.raises(ModelError, match="neither a model directory nor one of gemma-3-1b, "):
        find_model("no-such-model")


def test_a_pool_without_room_is_empty() -> None:
    """Weights that do not fit leave an empty pool, not a negative one."""
    pool = Pool(deployed(LLAMA_70B), Budget(H100.memory_bytes))
    assert pool.gpu_bytes < 0
    assert (pool.blocks, pool.sequences(CONTEXT_TOKENS)) == (0, 0)


def test_planning_needs_no_torch() -> None:
    """The command works without torch, as in the router's image."""
    script = (
        "import sys; sys.modules['torch'] = None; from kvroute.cli import main\n"
        "sys.exit(main(['plan', '--model', 'qwen3-8b', '--json']))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(result.stdout)["max_sequences"] == 44
