"""The engine compared with transformers: the same 91-million-parameter Llama in bf16 and prompts, in turns.

Our figures are whole engine steps: scheduling, block hashing, events, forward pass and sampling. Those of
transformers are the forward pass with a DynamicCache, and argmax.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from benchmarks.report import SHAPE, Figure
from model_server.config import EngineConfig
from model_server.engine.build import build_engine
from model_server.engine.core import EngineCore
from model_server.requests import EngineCoreOutput, EngineCoreRequest, SamplingParams

# Wall-clock seconds, or CPU seconds of the process's threads, which spin while they wait for each other.
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}

_PROMPT_TOKENS = 256
# Decode steps of one round by batch size; about a second in total for each engine.
_STEPS = {1: 24, 8: 12, 32: 6}


def measure(rounds: int, clock: Callable[[], float]) -> Iterator[Figure]:
    """Measure prefill at batch 1 and decode at 1, 8 and 32; ratios are transformers' time divided by ours."""
    torch.manual_seed(0)
    reference = LlamaForCausalLM(LlamaConfig(**SHAPE)).to(torch.bfloat16).eval()
    with tempfile.TemporaryDirectory(prefix="kvroute-bench-") as directory:
        reference.save_pretrained(directory)
        for batch, steps in _STEPS.items():
            sides = {
                "transformers": _Transformers(reference, clock),
                "engine": _OurEngine(Path(directory), batch, clock),
            }
            taken: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
            for number in range(rounds + 1):
                prompts = torch.randint(3, SHAPE["vocab_size"], (batch, _PROMPT_TOKENS)).tolist()
                for name, side in sides.items():
                    times = side.prefill(prompts), side.decode(steps)
                    if number:  # the first warms up
                        taken[name].append(times)
            setting = {
                "batch": batch,
                "prompt_tokens": _PROMPT_TOKENS,
                "decode_steps": steps,
                "dtype": "bfloat16",
            }
            if batch == 1:
                yield from _figures("prefill_b1", 0, _PROMPT_TOKENS, taken, setting)
            yield from _figures(f"decode_b{batch}", 1, batch * steps, taken, setting)


class _Transformers:
    def __init__(self, model: LlamaForCausalLM, clock: Callable[[], float]) -> None:
        self._model = model
        self._clock = clock

    def prefill(self, prompts: list[list[int]]) -> float:
        """Return the seconds until the first token."""
        self._cache = DynamicCache(config=self._model.config)
        self._tokens = torch.tensor(prompts)
        return self.decode(1)

    @torch.inference_mode()
    def decode(self, steps: int) -> float:
        """Return the seconds of some steps."""
        started_s = self._clock()
        for _ in range(steps):
            output = self._model(self._tokens, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
            self._tokens = output.logits[:, -1:].argmax(-1)
        return self._clock() - started_s


class _OurEngine:
    def __init__(self, directory: Path, batch: int, clock: Callable[[], float]) -> None:
        config = EngineConfig(
            model=str(directory),
            gpu_blocks=4 * batch * _PROMPT_TOKENS // 16,
            max_model_len=2 * _PROMPT_TOKENS,
            max_num_seqs=batch,
            max_num_batched_tokens=batch * _PROMPT_TOKENS,
        )
        self._engine: EngineCore = build_engine(config)
        self._clock = clock
        self._round = 0

    def prefill(self, prompts: list[list[int]]) -> float:
        """Return the seconds until the first token."""
        for number in range(len(prompts)):
            self._engine.abort_request(f"{self._round}.{number}")
        self._round += 1
        sampling = SamplingParams(max_tokens=_PROMPT_TOKENS, temperature=0.0, ignore_eos=True)
        for number, prompt in enumerate(prompts):
            self._engine.add_request(
                EngineCoreRequest(f"{self._round}.{number}", tuple(prompt), sampling), _drop
            )
        return self.decode(1)

    def decode(self, steps: int) -> float:
        """Return the seconds of some steps."""
        started_s = self._clock()
        for _ in range(steps):
            self._engine.step()
        return self._clock() - started_s


def _figures(
    name: str,
    part: int,
    tokens: int,
    taken: dict[str, list[tuple[float, float]]],
    setting: dict[str, object],
) -> Iterator[Figure]:
    times = {side: [one[part] for one in rounds] for side, rounds in taken.items()}
    for side, seconds in times.items():
        yield Figure(f"{name}_{side}", "tokens/s", round(tokens / statistics.median(seconds), 1), setting)
    ratios = [theirs / ours for theirs, ours in zip(times["transformers"], times["engine"], strict=True)]
    yield Figure(f"{name}_ratio_to_transformers", "x", round(statistics.median(ratios), 3), setting)


def _drop(_: EngineCoreOutput) -> None:
    pass
