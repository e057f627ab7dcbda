"""The engine with a real model: outputs do not depend on scheduling or caching."""

import hashlib
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from model_server.config import EngineConfig
from model_server.engine.build import build_engine
from model_server.engine.core import EngineCore
from model_server.errors import ConfigError, WorkerError
from model_server.kv_events.hashing import ROOT_BLOCK_HASH, hash_block
from model_server.model.weights import load_checkpoint, load_tiny
from model_server.requests import EngineCoreRequest
from tests.support.model_server.engine import EventLog, Outputs, cached_copies, request, run_to_end
from tokenization import TINY_DIRECTORY, PromptTokenizer

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def prompt(length: int, seed: int) -> list[int]:
    """Return random tokens of the tiny vocabulary."""
    return random.Random(seed).choices(range(3, 4096), k=length)


def conversation() -> list[EngineCoreRequest]:
    """Return requests that share a system prompt; some are repeated, one is sampled with a seed."""
    system = prompt(48, 0)
    turns = [(0, 1), (1, 20), (2, 37), (3, 16), (1, 20)]
    items = [
        request(f"r{index}", system + prompt(length, seed), max_tokens=24, ignore_eos=True)
        for index, (seed, length) in enumerate(turns)
    ]
    sampled = request("sampled", system + prompt(9, 4), max_tokens=24, temperature=1.0, top_p=0.9, seed=11)
    return [*items, sampled]


def generate(engine: EngineCore, items: list[EngineCoreRequest], *, at_once: bool = True) -> Outputs:
    """Run requests together or one after the other; return their tokens."""
    outputs = Outputs()
    for item in items:
        engine.add_request(item, outputs)
        if not at_once:
            run_to_end(engine)
    run_to_end(engine)
    return outputs


@pytest.fixture(scope="module")
def alone() -> dict[str, list[int]]:
    """Return each request's output when run alone without a cache."""
    torch.set_num_threads(1)
    engine = build_engine(EngineConfig(enable_prefix_caching=False))
    return dict(generate(engine, conversation(), at_once=False).tokens)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"block_tokens": 4},
        {"max_num_batched_tokens": 16, "max_num_seqs": 16},
        {"max_num_batched_tokens": 7, "max_num_seqs": 7, "block_tokens": 8},
        {"max_num_seqs": 2},
        {"gpu_blocks": 14, "max_model_len": 160},
    ],
    ids=str,
)
def test_scheduling_and_caching_change_no_token(alone: dict[str, list[int]], settings: dict) -> None:
    """Batched, chunked, cached or preempted requests generate the same tokens as alone without a cache."""
    events = EventLog()
    engine = build_engine(EngineConfig(**settings), events.publish)
    items = conversation()
    outputs = generate(engine, items)
    assert outputs.tokens == alone
    if "gpu_blocks" in settings:
        assert engine.stats().preemptions > 0
    # Repeat with the cache that the first round has filled.
    again = generate(engine, [*reversed(items)], at_once=False)
    assert again.tokens == alone
    assert sum(last.cached_tokens for last in again.last.values()) > 0
    assert events.mirror == cached_copies(engine)


def test_a_corrupted_block_changes_the_answer() -> None:
    """The engine reads its cache: corrupting one cached block changes the output."""
    engine = build_engine(EngineConfig())
    item = request("a", prompt(400, 5), max_tokens=24, ignore_eos=True)
    first = generate(engine, [item])
    again = generate(engine, [item])
    assert (again.tokens, again.last["a"].cached_tokens) == (first.tokens, 384)
    block = engine.kv_cache.block_pool.get_cached_block((0, _first_digest(item)))
    assert block is not None
    for tensor in engine.executor.runner.attention.block_tensors():
        tensor[:, block.block_id] += 1.0
    assert generate(engine, [item]).tokens != first.tokens


def test_stop_tokens_are_banned_before_min_tokens(alone: dict[str, list[int]]) -> None:
    """A stop token is banned until min_tokens are generated and accepted right after."""
    engine = build_engine(EngineConfig())
    stop = frozenset({alone["r0"][2]})
    prompt_tokens = conversation()[0].prompt_token_ids
    items = [
        request(f"{count}", prompt_tokens, max_tokens=5, min_tokens=count, stop_token_ids=stop)
        for count in range(5)
    ]
    tokens = generate(engine, items).tokens
    for count in range(3):
        assert tokens[str(count)] == alone["r0"][:3]
    for count in (3, 4):
        assert tokens[str(count)][:2] == alone["r0"][:2]
        assert not stop & set(tokens[str(count)][:count])


def test_the_tiny_model_is_the_same_in_every_process() -> None:
    """Weights of the tiny model depend neither on the process nor on torch's global random state."""
    script = (
        "import torch, hashlib; torch.manual_seed(3); from model_server.model.weights import load_tiny\n"
        "weights = load_tiny('auto', torch.device('cpu')).model.weights()\n"
        "print(hashlib.sha256(b''.join(w.tensor.numpy().tobytes() for w in weights.values())).hexdigest())"
    )
    other = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300
    )
    weights = load_tiny("auto", CPU).model.weights()
    here = hashlib.sha256(b"".join(w.tensor.numpy().tobytes() for w in weights.values())).hexdigest()
    assert other.stdout.strip() == here


def test_tiny_model_has_the_tiny_tokenizers_vocabulary() -> None:
    """Model and tokenizer of the tiny model have the same vocabulary and end-of-sequence token."""
    loaded = load_tiny("auto", CPU)
    tokenizer = PromptTokenizer.from_directory(TINY_DIRECTORY)
    assert loaded.model.shape.vocab_size == tokenizer.vocab_size
    assert loaded.eos_token_ids == tokenizer.eos_token_ids


def test_the_tiny_model_writes_varied_text_of_full_length() -> None:
    """The tiny model's greedy text neither ends at once nor repeats one loop."""
    engine = build_engine(EngineConfig())
    items = [request(f"r{seed}", prompt(20 + 7 * seed, seed), max_tokens=100) for seed in range(8)]
    outputs = generate(engine, items)
    for tokens in outputs.tokens.values():
        assert len(tokens) == 100
        assert len(set(tokens)) > 60


def test_checkpoint_output_equals_transformers(tmp_path: Path) -> None:
    """Greedy output of a Hugging Face checkpoint equals that of transformers."""
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        eos_token_id=None,
    )
    torch.manual_seed(1)
    reference = LlamaForCausalLM(config).eval()
    reference.save_pretrained(tmp_path)
    text = [5, 6, 7, 8, 9, 10, 11]
    with torch.inference_mode():
        want = reference.generate(torch.tensor([text]), max_new_tokens=30, do_sample=False)[0].tolist()[7:]
    engine = build_engine(EngineConfig(model=str(tmp_path), block_tokens=4, gpu_blocks=64))
    assert generate(engine, [request("a", text, max_tokens=30)]).tokens["a"] == want
    assert engine.max_model_len == 64
    assert load_checkpoint(tmp_path, "auto", CPU).eos_token_ids == frozenset()


def test_accelerator_error_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """An accelerator error ends the engine, not only its step's requests."""
    engine = build_engine(EngineConfig(gpu_blocks=64))

    def broken(*_: object) -> None:
        raise torch.AcceleratorError("illegal memory access")

    monkeypatch.setattr(engine.executor.runner.model, "forward", broken)
    engine.add_request(request("a", [5, 6, 7]), Outputs())
    with pytest.raises(WorkerError, match="does not recover: illegal memory access"):
        engine.step()


def test_the_context_fits_the_pool_or_is_refused() -> None:
    """An unset max_model_len shrinks to the pool; one beyond the model or the pool fails the start."""
    assert build_engine(EngineConfig(gpu_blocks=10)).max_model_len == 160
    assert build_engine(EngineConfig()).max_model_len == 8192
    with pytest.raises(ConfigError, match="8192 positions"):
        build_engine(EngineConfig(max_model_len=8193))
    with pytest.raises(ConfigError, match="there are 10"):
        build_engine(EngineConfig(gpu_blocks=10, max_model_len=161))


def _first_digest(item: EngineCoreRequest) -> bytes:
    return hash_block(ROOT_BLOCK_HASH, item.prompt_token_ids[:16], None)
