"""An engine on any device with a random model, and requests that decode in it on the caller's thread."""

from __future__ import annotations

import gc
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.device_time import busy_s
from benchmarks.report import SHAPE
from model_server.config import EngineConfig
from model_server.engine.build import build_engine, deployment_of
from model_server.engine.core import EngineCore
from model_server.requests import EngineCoreOutput, EngineCoreRequest, SamplingParams
from model_server.shapes.deployment import Deployment
from model_server.shapes.hf_config import HfConfig
from planning.presets import Gpu, find_model

BLOCK_TOKENS = 16
OUTPUT_TOKENS = 1024  # longest answer
_GROWTH_TOKENS = 256  # room for the answers of a whole batch, whose rest is aborted
_CHUNK_TOKENS = 8192
_WARM_STEPS, _STEPS = 3, 8
_REQUEST_IDS = itertools.count()
_CUDA_MODEL = "llama-3.1-8b"
_TINY = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}


@dataclass(frozen=True, slots=True)
class Target:
    """Model and device under test."""

    checkpoint: Path  # directory of the model
    device: torch.device
    roof: Gpu  # peak speeds of the device
    quick: bool  # tiny sizes, only to show that it runs

    def size(self, full: int, quick: int) -> int:
        """Return an amount for a full or a quick run."""
        return quick if self.quick else full

    def config(self, sequences: int, tokens: int, **settings: Any) -> EngineConfig:
        """Return settings with a pool for a batch of `sequences` prompts of `tokens` tokens and answers."""
        defaults = {
            "model": str(self.checkpoint),
            "device": str(self.device),
            "gpu_blocks": sequences * blocks_of(tokens + _GROWTH_TOKENS) + blocks_of(OUTPUT_TOKENS),
            "max_num_seqs": sequences,
            "max_num_batched_tokens": min(_CHUNK_TOKENS, max(2048, tokens)),
            "max_model_len": tokens + OUTPUT_TOKENS,
        }
        return EngineConfig(**(defaults | settings))

    @contextmanager
    def engine(self, config: EngineConfig) -> Iterator[EngineCore]:
        """Build an engine that is not started; close it and free its memory at the end."""
        engine = build_engine(config)
        try:
            yield engine
        finally:
            engine.close()
            del engine
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def deployment(self, *, fp8: bool = False) -> Deployment:
        """Return the model as `kvroute plan` sees it."""
        return deployment_of(
            EngineConfig(model=str(self.checkpoint), kv_cache_dtype="fp8" if fp8 else "auto")
        )


class Load:
    """Greedy requests with distinct random prompts."""

    def __init__(self, engine: EngineCore, device: torch.device) -> None:
        self.engine = engine
        self._device = device
        self._draw = random.Random(0)
        self._tokens: Counter[str] = Counter()  # tokens in the context, by live request
        self._error: str | None = None

    def start(self, batch: int, prompt_tokens: int, max_tokens: int = OUTPUT_TOKENS) -> None:
        """Add requests and step until each has its first token."""
        waiting = set()
        for number in itertools.islice(_REQUEST_IDS, batch):
            prompt = tuple(self._draw.choices(range(3, 1000), k=prompt_tokens))
            sampling = SamplingParams(max_tokens, temperature=0.0, ignore_eos=True)
            self._tokens[f"{number}"] = prompt_tokens
            self.engine.add_request(EngineCoreRequest(f"{number}", prompt, sampling), self._observe)
            waiting.add(f"{number}")
        while any(self._tokens[name] == prompt_tokens for name in waiting):
            self.run(1)

    def fill(self, batch: int, prompt_tokens: int) -> None:
        """Start requests, on a CPU with noise as the KV of their prompts: computing it would take minutes."""
        if self._device.type == "cuda":
            self.start(batch, prompt_tokens)
            return
        for tensor in self.engine.executor.runner.attention.block_tensors():
            if tensor.is_floating_point() and tensor.element_size() > 1:
                tensor.normal_()
            else:
                tensor.view(torch.uint8).random_(0, 120)  # finite e4m3 numbers
        logits = torch.zeros((batch, self.engine.vocab_size))
        with _replaced_forward(self.engine, lambda _, rows, *__: logits[: len(rows)]):
            self.start(batch, prompt_tokens)

    def keep(self, batch: int) -> None:
        """Abort all requests but the first ones."""
        for name in list(self._tokens)[batch:]:
            self.engine.abort_request(name)
            del self._tokens[name]

    @property
    def context_tokens(self) -> int:
        """Tokens of the longest context."""
        return max(self._tokens.values())

    def run(self, steps: int) -> float:
        """Run some steps; return the seconds of each. Raises a RuntimeError if a request failed."""
        started_s = time.perf_counter()
        for _ in range(steps):
            self.engine.step()
        taken_s = time.perf_counter() - started_s
        if self._error is not None:
            raise RuntimeError(f"a request failed: {self._error}")
        return taken_s / steps

    def warm_up(self) -> int:
        """Run a few steps; return the number of steps that take about a second, at most 8."""
        return max(1, min(_STEPS, int(1 / self.run(_WARM_STEPS))))

    def host_s(self, steps: int) -> float:
        """Run some steps; return the seconds of each in which the device does not compute.

        On a CPU these are scheduling, sampling and delivery: all but the model's forward pass.
        """
        if self._device.type == "cuda":
            step_s = self.run(steps)
            return max(0.0, step_s - busy_s(lambda: self.run(steps), self._device) / steps)
        forward: Callable[..., object] = self.engine.executor.runner.model.forward
        spent_s = 0.0

        def timed(*args: object) -> object:
            nonlocal spent_s
            started_s = time.perf_counter()
            made = forward(*args)
            spent_s += time.perf_counter() - started_s
            return made

        with _replaced_forward(self.engine, timed):
            return self.run(steps) - spent_s / steps

    def _observe(self, output: EngineCoreOutput) -> None:
        self._error = self._error or output.error
        if output.request_id in self._tokens:
            self._tokens[output.request_id] += len(output.token_ids)


@contextmanager
def _replaced_forward(engine: EngineCore, forward: Callable[..., object]) -> Iterator[None]:
    model: Any = engine.executor.runner.model
    before, model.forward = model.forward, forward
    try:
        yield
    finally:
        model.forward = before


def blocks_of(tokens: int) -> int:
    """Return the KV blocks of one sequence."""
    return -(-tokens // BLOCK_TOKENS)


def default_device() -> str:
    """Return `cuda` where torch finds a card, else `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def model_of(name: str | None, device: torch.device, *, quick: bool) -> HfConfig:
    """Return a model: the named one, else Llama-3.1-8B on CUDA and one of 91 million parameters on a CPU."""
    if name is None and device.type == "cuda" and not quick:
        name = _CUDA_MODEL
    if name is not None:
        return find_model(name)
    values = {**SHAPE, **(_TINY if quick else {}), "max_position_embeddings": 65_536}
    return HfConfig({**values, "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}, "random Llama")
