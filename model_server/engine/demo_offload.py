"""`kvroute model-server demo-offload`: time to first token cold, and cached on device or host; then pressure.

Other prompts evict the measured prompt from the device's pool, as traffic does. Under pressure, twice as many
prompts as the pool holds arrive in random order; the report says which tier served how many of their tokens.
"""

import random
import time
from collections import Counter

from model_server.config import EngineConfig
from model_server.engine.build import build_engine
from model_server.engine.core import EngineCore
from model_server.kv_events.events import MEDIUM_CPU, MEDIUM_GPU
from model_server.requests import EngineCoreOutput, EngineCoreRequest, SamplingParams

_SAMPLING = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
_ROUNDS = 3
_VISITS = 3  # of each prompt under pressure, on average


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
    lines += _under_pressure(engine, draw, prompt_tokens, 2 * others)
    engine.close()
    return lines


def _under_pressure(engine: EngineCore, draw: random.Random, prompt_tokens: int, prompts: int) -> list[str]:
    """Send prompts in random order; return the lines of their statistics per tier."""
    working_set = [_prompt(draw, prompt_tokens) for _ in range(prompts)]
    visits = draw.choices(working_set, k=_VISITS * prompts)
    before = engine.stats()
    most = Counter[str]()
    for number, prompt in enumerate(visits):
        first_token(engine, f"pressure.{number}", prompt)
        most |= Counter({tier: len(blocks) for tier, blocks in engine.kv_cache.contents().items()})
    now = engine.stats()
    asked = now.prefix_queries_tokens - before.prefix_queries_tokens
    device = now.device_hits_tokens - before.device_hits_tokens
    host = now.host_hits_tokens - before.host_hits_tokens
    stored = now.swapped_out_blocks - before.swapped_out_blocks
    restored = now.swapped_in_blocks - before.swapped_in_blocks
    mib = (stored + restored) * now.block_bytes / 2**20
    return [
        f"pressure    {len(visits)} requests for {prompts} prompts of {prompt_tokens} tokens, {asked} tokens",
        f"  device    {device} tokens hit; at most {most[MEDIUM_GPU]} of {now.total_blocks} blocks cached",
        f"  host      {host} tokens hit; at most {most[MEDIUM_CPU]} of {now.host_blocks} blocks cached; "
        f"{stored} blocks stored and {restored} restored, {mib:.0f} MiB",
        f"  computed  {asked - device - host} tokens; {now.preemptions} preemptions",
    ]


def _prompt(draw: random.Random, tokens: int) -> tuple[int, ...]:
    return tuple(draw.choices(range(3, 1000), k=tokens))


def _one_round(
    engine: EngineCore, draw: random.Random, prompt_tokens: int, others: int, number: int
) -> list[tuple[float, int]]:
    """Return (seconds, cached tokens) of the prompt: cold, repeated, and after its eviction."""
    prompt, *rest = (_prompt(draw, prompt_tokens) for _ in range(1 + others))
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
