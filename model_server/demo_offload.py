"""`kvroute model-server demo-offload`: one prompt three times, computed, from the device and from the host.

In: the engine's settings. Out: a line for each way with its time to first token. The prompt is pushed out of
the device's pool by others, as traffic would do it.
"""

import random
import time
from dataclasses import replace

from model_server.build import build_engine
from model_server.config import EngineConfig
from model_server.engine import Engine
from model_server.events import NullSink
from model_server.requests import GenerationRequest, SamplingParams, TokenOutput

_SAMPLING = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
_ROUNDS = 3


def demonstrate(config: EngineConfig, prompt_tokens: int) -> list[str]:
    """Measure the three ways.

    Args:
        config: The engine's settings; pool and host tier are made to fit the prompt.
        prompt_tokens: Length of the prompt.

    Returns:
        Lines to print: time to first token, cached tokens, and blocks and bytes moved.

    Raises:
        ModelServerError: The model cannot be loaded, or the prompt is too long for it.
    """
    blocks = -(-(prompt_tokens + 1) // config.block_tokens)
    engine = build_engine(
        replace(config, gpu_blocks=blocks, cpu_blocks=4 * blocks, cpu_gib=None, max_model_len=None),
        NullSink(),
    )
    draw = random.Random(0)
    rounds = [_one_round(engine, draw, prompt_tokens, number) for number in range(_ROUNDS + 1)][1:]
    lines = []
    for position, way in enumerate(("cold", "device hit", "host hit")):
        taken_s, cached = sorted(one[position] for one in rounds)[_ROUNDS // 2]
        lines.append(
            f"{way:<11} {taken_s * 1e3:9.1f} ms to first token, {cached} of {prompt_tokens} tokens cached"
        )
    stats = engine.stats()
    moved = (stats.swapped_out_blocks + stats.swapped_in_blocks) * stats.block_bytes
    lines.append(
        f"{stats.swapped_out_blocks} blocks stored in host memory and {stats.swapped_in_blocks} restored, "
        f"{moved / 2**20:.0f} MiB"
    )
    engine.close()
    return lines


def _one_round(
    engine: Engine, draw: random.Random, prompt_tokens: int, number: int
) -> list[tuple[float, int]]:
    """Return seconds and cached tokens of the prompt cold, again, and after others took its blocks."""
    prompt, other = (tuple(draw.choices(range(3, 1000), k=prompt_tokens)) for _ in range(2))
    taken = [first_token(engine, f"{number}.{turn}", prompt) for turn in range(2)]
    first_token(engine, f"{number}.other", other)
    return [*taken, first_token(engine, f"{number}.2", prompt)]


def first_token(engine: Engine, name: str, prompt: tuple[int, ...]) -> tuple[float, int]:
    """Run a prompt alone; returns the seconds to its first token and its cached tokens."""
    outputs: list[TokenOutput] = []
    started_s = time.perf_counter()
    engine.submit(GenerationRequest(name, prompt, _SAMPLING), outputs.append)
    while not outputs:
        engine.step()
    taken_s = time.perf_counter() - started_s
    while engine.step():  # stores what the request leaves
        pass
    return taken_s, outputs[-1].cached_tokens
