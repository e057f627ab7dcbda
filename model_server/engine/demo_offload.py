"""`kvroute model-server demo-offload`: time to first token cold, and cached on device or host.

Other prompts evict the measured prompt from the device's pool, as traffic does.
"""

import random
import time

from model_server.config import EngineConfig
from model_server.engine.build import build_engine
from model_server.engine.core import EngineCore
from model_server.requests import EngineCoreOutput, EngineCoreRequest, SamplingParams

_SAMPLING = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
_ROUNDS = 3


def demonstrate(config: EngineConfig, prompt_tokens: int) -> list[str]:
    """Return the lines of the report; raise a ModelServerError if the model or prompt does not fit."""
    engine = build_engine(config)
    # The prompt's blocks are the oldest, so allocating the whole pool once evicts them all.
    others = -(-engine.stats().total_blocks // max(1, prompt_tokens // config.block_tokens))
    draw = random.Random(0)
    rounds = [_one_round(engine, draw, prompt_tokens, others, number) for number in range(_ROUNDS + 1)][1:]
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
    engine: EngineCore, draw: random.Random, prompt_tokens: int, others: int, number: int
) -> list[tuple[float, int]]:
    """Return (seconds, cached tokens) of the prompt: cold, repeated, and after its eviction."""
    prompt, *rest = (tuple(draw.choices(range(3, 1000), k=prompt_tokens)) for _ in range(1 + others))
    taken = [first_token(engine, f"{number}.{turn}", prompt) for turn in range(2)]
    for at, other in enumerate(rest):
        first_token(engine, f"{number}.other.{at}", other)
    return [*taken, first_token(engine, f"{number}.2", prompt)]


def first_token(engine: EngineCore, name: str, prompt: tuple[int, ...]) -> tuple[float, int]:
    """Run one prompt; return the seconds to its first token and its cached tokens."""
    outputs: list[EngineCoreOutput] = []
    started_s = time.perf_counter()
    engine.add_request(EngineCoreRequest(name, prompt, _SAMPLING), outputs.append)
    while not outputs:
        engine.step()
    taken_s = time.perf_counter() - started_s
    while engine.step():  # completes the stores to the host tier
        pass
    return taken_s, outputs[-1].cached_tokens
