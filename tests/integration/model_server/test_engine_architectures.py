"""All architectures in a running engine, compared with transformers."""

from pathlib import Path

import pytest
import torch

from model_server.config import EngineConfig
from model_server.engine.build import build_engine
from tests.support.model_server.engine import Outputs, request, run_to_end
from tests.support.model_server.model import save_reference, text_of

ARCHITECTURES: dict[str, dict[str, object]] = {
    "llama": {},
    "mistral": {"sliding_window": 9},
    "qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "qwen3": {"head_dim": 12},
    "gemma3": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 9,
        "head_dim": 10,
        "tie_word_embeddings": True,
    },
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_answers_equal_transformers(tmp_path: Path, architecture: str) -> None:
    """Greedy outputs equal those of transformers: chunked, batched, preempted and with cached blocks."""
    reference = save_reference(tmp_path, architecture, **ARCHITECTURES[architecture])
    # Groups with a window have blocks of their own: 3 groups and 2.
    gpu_blocks = {"qwen2": 27, "gemma3": 20}.get(architecture, 22)
    config = EngineConfig(
        model=str(tmp_path),
        block_tokens=4,
        gpu_blocks=gpu_blocks,
        max_model_len=52,
        max_num_seqs=4,
        max_num_batched_tokens=11,
    )
    engine, outputs = build_engine(config), Outputs()
    system = text_of(17)
    prompts = {f"r{number}": system + text_of(3 + 5 * number, number + 1) for number in range(4)}
    prompts["again"] = prompts["r3"]
    for name, prompt in prompts.items():
        engine.add_request(request(name, prompt, max_tokens=14, ignore_eos=True), outputs)
    run_to_end(engine)
    assert engine.stats().preemptions > 0
    assert engine.stats().prefix_hits_tokens > 0
    for name, prompt in prompts.items():
        ids = reference.generate(
            torch.tensor([prompt]), max_new_tokens=14, min_new_tokens=14, do_sample=False, eos_token_id=None
        )
        assert outputs.tokens[name] == ids[0, len(prompt) :].tolist()
