"""The GPU's way through the engine, in Triton's interpreter: the tokens of the CPU, in every kind of step."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model_server.config import EngineConfig
from model_server.engine.build import build_engine
from model_server.requests import EngineCoreRequest, SamplingParams
from model_server.worker.cuda_graphs import Graph
from tests.integration.model_server.test_engine_architectures import ARCHITECTURES
from tests.support.model_server.engine import Outputs, request, run_to_end
from tests.support.model_server.lora import save_adapter
from tests.support.model_server.model import VOCAB_SIZE, save_reference, text_of


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class Recorded:
    """A captured step, which a replay computes again from the addresses of its capture."""

    def __init__(self, run: Callable[[], Tensor]) -> None:
        self.run, self.result, self.replays = run, run(), 0

    def replay(self) -> None:
        """Compute the step again."""
        self.replays += 1
        self.result.copy_(self.run())


class EvenTokens:
    """Constraint that allows even tokens only."""

    def compute_bitmask(self) -> bytes:
        """Return the allowed tokens."""
        return bytes([0b01010101] * (VOCAB_SIZE // 8 + 1))

    def consume_token(self, token: int) -> None:
        """Check the token."""
        assert token % 2 == 0


def settings(directory: Path, **changes: object) -> EngineConfig:
    """Return a small engine's settings, in which chunks, batches and preemptions occur."""
    values: dict[str, object] = {
        "model": str(directory),
        "block_tokens": 4,
        "gpu_blocks": 24,
        "max_model_len": 40,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 9,
        **changes,
    }
    return EngineConfig(**values)  # type: ignore[arg-type]


def tokens_of(
    config: EngineConfig,
    requests: list[EngineCoreRequest],
    adapters: dict[str, Path] | None = None,
    captured: list[Recorded] | None = None,
) -> dict[str, list[int]]:
    """Return the tokens of requests that run together; with `captured`, decodes are replayed from there."""

    def capture(run: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
        assert captured is not None
        captured.append(Recorded(run))
        return captured[-1], captured[-1].result

    engine, outputs = build_engine(config), Outputs()
    try:
        if captured is not None:
            engine.executor.runner.capture_graphs(capture)
        for name, directory in (adapters or {}).items():
            engine.loras.load(name, directory)
        for item in requests:
            engine.add_request(item, outputs)
        run_to_end(engine)
    finally:
        engine.close()
    return dict(outputs.tokens)


def prompts() -> list[EngineCoreRequest]:
    """Return greedy requests that share a system prompt."""
    system = text_of(9)
    return [
        request(f"r{number}", system + text_of(2 + 3 * number, number + 1), max_tokens=4, ignore_eos=True)
        for number in range(3)
    ]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_architectures_give_the_tokens_of_the_cpu(
    tmp_path: Path, architecture: str, kv_cache_dtype: str
) -> None:
    """Chunked, batched and cached, with captured decodes, tokens are those of the CPU and of plain torch."""
    save_reference(tmp_path, architecture, **ARCHITECTURES[architecture])
    config = settings(tmp_path, kv_cache_dtype=kv_cache_dtype)
    want = tokens_of(config, prompts())
    assert tokens_of(replace(config, attention_backend="torch"), prompts()) == want
    graphs: list[Recorded] = []
    assert tokens_of(replace(config, attention_backend="triton"), prompts(), captured=graphs) == want
    assert sum(graph.replays for graph in graphs) > 2


def test_adapters_and_constraints_give_the_tokens_of_the_cpu(tmp_path: Path) -> None:
    """In a batch of a base request, two adapters and a grammar, each gives its own tokens."""
    base = save_reference(tmp_path / "base")
    adapters = {name: save_adapter(tmp_path / name, base, seed=len(name)) for name in ("sql", "chats")}

    def asked() -> list[EngineCoreRequest]:
        sampling = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
        text = tuple(text_of(7))
        return [
            EngineCoreRequest("sql", text, sampling, lora_name="sql"),
            EngineCoreRequest("chats", text, sampling, lora_name="chats"),
            EngineCoreRequest("even", text, sampling, constraint=EvenTokens()),
        ]

    config = settings(tmp_path / "base")
    want = tokens_of(config, asked(), adapters)
    assert tokens_of(replace(config, attention_backend="triton"), asked(), adapters, []) == want
    assert len(set(map(tuple, want.values()))) == 3


def test_two_ranks_give_the_tokens_of_one(tmp_path: Path) -> None:
    """On two ranks, which each know block tables by their changes, tokens are those of the CPU on one."""
    save_reference(tmp_path)
    config = settings(tmp_path, torch_threads=1)
    want = tokens_of(config, prompts())
    two = replace(config, attention_backend="triton", tensor_parallel_size=2)
    assert tokens_of(two, prompts()) == want
