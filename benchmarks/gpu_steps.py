"""Steps of `benchmarks.gpu_first_look`, each in a process of its own: `python -m benchmarks.gpu_steps NAME`.

A step prints its figures as JSON lines. Attention is measured alone, through the engine's interface; all else
through whole engines with a random model.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import product
from pathlib import Path

import torch

from benchmarks import roofline
from benchmarks.device_time import busy_s
from benchmarks.engine_http import serving
from benchmarks.engine_load import BLOCK_TOKENS, Load, Target, blocks_of
from benchmarks.report import Figure
from benchmarks.roofs import measured_roof, roof_of
from model_server.attention import KvLayout, Span, new_attention
from model_server.config import ServeOptions
from model_server.openai.api_server import load_tokenizer
from model_server.openai.app import Server
from model_server.shapes.shape import AttentionShape, single_group

_ROUNDS = 5
_CONTRACT = (
    "tests/unit/model_server/attention/test_contract.py tests/unit/model_server/attention/test_kv_entries.py "
    "-q -n 0 -p no:cacheprovider"
)
_HEADS, _KV_HEADS, _HEAD_DIM = 32, 8, 128  # Llama-3.1-8B's
_CACHE_BYTES = 1 << 28  # each round reads at least this much KV, more than a GPU's L2 cache
_BUCKETS = tuple(1 << power for power in range(9))
_HTTP_STREAMS = (1, 32, 128)
_HTTP_TOKENS = (20, 120)
_SWITCH_INTERVALS_S = (0.005, 0.0005)
_LONG_TOKENS = 8192


def card(target: Target) -> Iterator[Figure]:
    """Yield the data sheet's peaks, and measured ones."""
    yield from roofline.roofs(target)
    measured = measured_roof(target.device, quick=target.quick)
    setting: dict[str, object] = {"torch": torch.__version__}
    if target.device.type == "cuda":
        setting["card"] = torch.cuda.get_device_name(target.device)
    yield Figure("measured_memory_gb_per_s", "GB/s", round(measured.memory_bytes_per_s / 1e9, 2), setting)
    yield Figure("measured_tflops", "TFLOP/s", round(measured.flops_per_s / 1e12, 3), setting)


def contract(target: Target) -> Iterator[Figure]:
    """Run the tests of attention that need a GPU; raises a RuntimeError if one fails or none ran."""
    argv = [sys.executable, "-m", "pytest", *_CONTRACT.split()]
    ran = subprocess.run(argv, capture_output=True, text=True)
    print(ran.stdout, ran.stderr, file=sys.stderr)
    for outcome in ("passed", "failed", "skipped"):
        found = re.search(rf"(\d+) {outcome}", ran.stdout)
        yield Figure(f"contract_{outcome}", "tests", int(found[1]) if found else 0)
    if ran.returncode or " passed" not in ran.stdout:
        raise RuntimeError(f"tests of attention on {target.device}: exit status {ran.returncode}")


def kernel(target: Target) -> Iterator[Figure]:
    """Yield the rate at which attention alone reads KV to decode, by type of KV, batch and context."""
    contexts = (48, 96) if target.quick else (1024, 8192, 65_536)
    for fp8, batch, context in product((False, True), (1, 32, 128), contexts):
        token_bytes = 2 * _KV_HEADS * _HEAD_DIM * (1 if fp8 else 2)
        kv_bytes = batch * blocks_of(context) * BLOCK_TOKENS * token_bytes
        torch.cuda.empty_cache()  # so that the next line sees what the last case returned
        if target.device.type == "cuda" and kv_bytes > 0.7 * torch.cuda.mem_get_info(target.device)[0]:
            print(f"left out, the device is too small: batch={batch} context={context}", file=sys.stderr)
            continue
        seconds = _attention_s(target, [(context - 1, 1)] * batch, fp8=fp8)
        rate = batch * context * token_bytes / seconds
        name = f"kernel_b{batch}_{context}{'_fp8' if fp8 else ''}"
        share = 100 * rate / target.roof.memory_bytes_per_s
        yield Figure(f"{name}_gb_per_s", "GB/s", round(rate / 1e9, 2), {"roof_percent": round(share, 1)})


def prefill(target: Target) -> Iterator[Figure]:
    """Yield the arithmetic rate of attention alone and of the whole model, by length of the prompt."""
    for tokens in (64, 128) if target.quick else (2048, 8192, 32_768):
        seconds = _attention_s(target, [(0, tokens)], fp8=False)
        rate = 4 * _HEADS * _HEAD_DIM * roofline.attended_pairs(tokens, None) / seconds
        share = 100 * rate / target.roof.flops_per_s
        setting: dict[str, object] = {"roof_percent": round(share, 1)}
        yield Figure(f"attention_{tokens}_tflops", "TFLOP/s", round(rate / 1e12, 3), setting)
    yield from roofline.prefill(target, _rounds(target), (2048, 8192, 32_768))


def _attention_s(target: Target, parts: list[tuple[int, int]], *, fp8: bool) -> float:
    """Return the device's seconds of one layer's attention, for sequences of (start, length).

    All use of the attention interface is here.
    """
    blocks = [blocks_of(start + length) for start, length in parts]
    layer_bytes = sum(blocks) * BLOCK_TOKENS * 2 * _KV_HEADS * _HEAD_DIM
    layers = 1 if target.quick else max(1, min(32, _CACHE_BYTES // layer_bytes))
    shape = AttentionShape(_HEADS, _KV_HEADS, _HEAD_DIM, _HEAD_DIM**-0.5, (None,) * layers)
    layout = KvLayout(single_group(layers), sum(blocks), BLOCK_TOKENS)
    attention = new_attention(shape, layout, torch.bfloat16, target.device, fp8=fp8)
    for tensor in attention.block_tensors():
        if tensor.element_size() == 1:
            tensor.view(torch.uint8).random_(0, 120)  # finite e4m3 numbers
        elif tensor.dtype == torch.float32:
            tensor.fill_(2.0**-8)  # their scales
        else:
            tensor.normal_()
    spans, first = [], 0
    for (start, length), count in zip(parts, blocks, strict=True):
        spans.append(Span(start, length, [range(first, first + count)]))
        first += count
    tokens = sum(length for _, length in parts)
    size = {"dtype": torch.bfloat16, "device": target.device}
    query = torch.randn((tokens, _HEADS, _HEAD_DIM), **size)
    key, value = torch.randn((2, tokens, _KV_HEADS, _HEAD_DIM), **size)
    with torch.inference_mode():
        meta = attention.prepare(spans)
        for layer in range(layers):
            attention.store(layer, key, value, meta)

        def attend() -> None:
            for layer in range(layers):
                attention.attend(query, layer, meta)

        attend()  # compiles
        return statistics.median(busy_s(attend, target.device) for _ in range(_rounds(target))) / layers


def decode(target: Target) -> Iterator[Figure]:
    """Yield the figures of `kvroute bench engine --part roofline` for decode."""
    for fp8 in (False, True):
        yield from roofline.decode(target, _rounds(target), fp8=fp8)


def buckets(target: Target) -> Iterator[Figure]:
    """Yield the time of a decode step for each batch size of a CUDA graph, with graphs and without."""
    batches = _BUCKETS[: target.size(len(_BUCKETS), 2)]
    yield from roofline.decode(target, _rounds(target), batches=batches, context_tokens=256, label="graphs_")
    eager = {"label": "eager_", "enforce_eager": True}
    yield from roofline.decode(target, _rounds(target), batches=batches, context_tokens=256, **eager)


def store(target: Target) -> Iterator[Figure]:
    """Yield the change of step time while 1 GB is stored in the host tier."""
    for batch in (32, 128)[: target.size(2, 1)]:
        yield from roofline.store(target, _rounds(target), batch)


def sleep(target: Target) -> Iterator[Figure]:
    """Yield the memory that sleeping returns, and the seconds of sleeping and waking."""
    tokens = target.size(1024, 48)
    config = target.config(target.size(32, 2), tokens, cpu_blocks=target.size(4096, 64))
    with target.engine(config) as engine:
        load = Load(engine, target.device)
        load.start(1, tokens, 1)
        before, started_s = _free_bytes(target), time.perf_counter()
        if not engine.sleep():
            raise RuntimeError("the engine did not sleep: blocks are in use")
        asleep_s, freed = time.perf_counter() - started_s, _free_bytes(target)
        engine.wake_up()
        awake_s = time.perf_counter() - started_s - asleep_s
        load.start(1, tokens, 1)  # raises if the engine does not serve again
        pool_bytes, host_bytes = (
            count * engine.stats().block_bytes for count in (config.gpu_blocks, config.cpu_blocks)
        )
    setting: dict[str, object] = {"pool_bytes": pool_bytes, "host_tier_bytes": host_bytes}
    for name, one, other in zip(("device", "host"), before, freed, strict=True):
        yield Figure(f"sleep_returned_{name}_gb", "GB", round((other - one) / 1e9, 3), setting)
    yield Figure("sleep_s", "s", round(asleep_s, 3), setting)
    yield Figure("wake_up_s", "s", round(awake_s, 3), setting)


def oom(target: Target) -> Iterator[Figure]:
    """Let a long prompt run out of memory; raises a RuntimeError unless it alone fails."""
    with target.engine(target.config(1, _LONG_TOKENS)) as engine:
        load = Load(engine, target.device)
        load.start(1, 64, 1)
        torch.cuda.empty_cache()
        free_bytes = torch.cuda.mem_get_info(target.device)[0] - (64 << 20)
        ballast = torch.empty(max(1, free_bytes), dtype=torch.uint8, device=target.device)
        message = ""
        try:
            load.start(1, _LONG_TOKENS, 1)
        except RuntimeError as error:
            message = str(error)
        del ballast
        torch.cuda.empty_cache()
        Load(engine, target.device).start(1, 64, 1)
        if "out of memory" not in message or not engine.stats().healthy:
            raise RuntimeError(f"out of memory is not survived as it should be: error={message!r}")
    yield Figure("oom_survived", "requests", 1, {"error": message[:80]})


def full_pool(target: Target) -> Iterator[Figure]:
    """Yield the time to first token of a long prompt that arrives at a full pool."""
    tokens, batch = target.size(_LONG_TOKENS, 256), 16
    short, limit = tokens // batch, tokens + 64
    pool = blocks_of(limit) + 1
    config = target.config(batch + 1, tokens, gpu_blocks=pool, cpu_blocks=pool, max_model_len=limit)
    with target.engine(config) as engine:
        load = Load(engine, target.device)
        load.start(batch, short - target.size(16, 4), 32)
        usage, started_s = engine.stats().kv_usage, time.perf_counter()
        load.start(1, tokens, 1)
        taken_s, stats = time.perf_counter() - started_s, engine.stats()
    setting: dict[str, object] = {"kv_usage": round(usage, 3), "stored_blocks": stats.swapped_out_blocks}
    yield Figure("full_pool_first_token_ms", "ms", round(1e3 * taken_s, 1), setting)
    yield Figure("full_pool_preemptions", "requests", stats.preemptions, setting)


def http(target: Target) -> Iterator[Figure]:
    """Yield tokens per second over HTTP, by streams and by the interpreter's switch interval."""
    config = target.config(max(_HTTP_STREAMS), 512)
    options = ServeOptions(config, "127.0.0.1", 0, ("random",), None, 1 << 20)
    with target.engine(config) as engine:
        engine.start()
        server = Server(options, engine, None, load_tokenizer(config.model))
        with serving(lambda _: server) as (port, _):
            all_streams = _HTTP_STREAMS[: target.size(3, 2)]
            _clients_s(port, max(all_streams), _HTTP_TOKENS[0])  # warms up
            for interval_s, streams in product(_SWITCH_INTERVALS_S, all_streams):
                sys.setswitchinterval(interval_s)
                short_s, long_s = (_clients_s(port, streams, tokens) for tokens in _HTTP_TOKENS)
                token_s = (long_s - short_s) / (_HTTP_TOKENS[1] - _HTTP_TOKENS[0])
                setting: dict[str, object] = {"ms_per_token_of_a_stream": round(1e3 * token_s, 2)}
                name = f"http_{streams}_streams_switch_{1e3 * interval_s:g}_ms"
                yield Figure(f"{name}_tokens_per_s", "tokens/s", round(streams / token_s, 1), setting)


def _clients_s(port: int, streams: int, tokens: int) -> float:
    arguments = map(str, (port, streams, tokens))
    started_s = time.perf_counter()
    subprocess.run([sys.executable, "-m", "benchmarks.stream_client", *arguments], check=True)
    return time.perf_counter() - started_s


def _free_bytes(target: Target) -> tuple[int, int]:
    """Return the free bytes of the device (0 if it is a CPU) and of the host."""
    # Pinned memory is not in this process's resident size.
    available = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
    assert available is not None
    on_device = torch.cuda.mem_get_info(target.device)[0] if target.device.type == "cuda" else 0
    return on_device, 1024 * int(available[1])


def _rounds(target: Target) -> int:
    return target.size(_ROUNDS, 1)


_STEPS: tuple[Callable[[Target], Iterator[Figure]], ...] = (
    *(card, contract, kernel, prefill, decode, buckets, store, sleep, oom, full_pool, http),
)


def main() -> int:
    """Run one step."""
    parser = argparse.ArgumentParser(description=__doc__)
    steps = {step.__name__: step for step in _STEPS}
    parser.add_argument("step", choices=steps)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true")
    read = parser.parse_args()
    device = torch.device(read.device)
    target = Target(read.checkpoint, device, roof_of(device, quick=read.quick), read.quick)
    for figure in steps[read.step](target):
        print(json.dumps(asdict(figure)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
