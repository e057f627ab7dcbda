"""A plan as a page of text; GB are decimal, as on data sheets."""

from collections.abc import Iterable, Iterator, Sequence

from model_server.plan.deployment import Deployment
from model_server.plan.plan import Plan, sequences_in
from model_server.shapes import KvGroupSpec

_GB = 1e9


def pool_line(deployment: Deployment, blocks: int, context_tokens: int) -> str:
    """Describe a pool of so many blocks in one line."""
    total_bytes = blocks * deployment.gpu_block_bytes * deployment.tensor_parallel
    sequences = sequences_in(deployment, blocks, context_tokens)
    return (
        f"{blocks:,} blocks of {deployment.block_tokens} tokens, {_size(total_bytes)}, "
        f"{deployment.token_bytes:,.0f} bytes a token; "
        f"{sequences:,} sequences of {context_tokens:,} tokens at once"
    )


def plan_lines(plan: Plan) -> Iterator[str]:
    """Yield the page."""
    deployment, gpu = plan.pool.deployment, plan.gpu
    size = deployment.tensor_parallel
    kv_bits = 8 if deployment.fp8_kv else 8 * deployment.weight_bytes
    yield (
        f"{plan.name} on {size} x {gpu.name}: {8 * deployment.weight_bytes}-bit weights, {kv_bits}-bit KV, "
        f"sequences of {plan.context_tokens:,} tokens"
    )
    yield ""
    yield from _memory(plan)
    yield ""
    yield from _kv_groups(plan)
    yield ""
    yield (
        f"At once: {plan.sequences:,} sequences of {plan.context_tokens:,} tokens. "
        f"Longest text alone: {plan.longest_context:,} tokens."
    )
    yield ""
    yield from _decode(plan)
    yield ""
    yield from _parallel(plan)
    yield ""
    yield from _preemption(plan)


def _memory(plan: Plan) -> Iterator[str]:
    pool, budget = plan.pool, plan.pool.budget
    deployment = pool.deployment
    rows = [
        ("usable", budget.usable_bytes, f"{budget.utilization:g} of {budget.memory_bytes / _GB:,.1f} GB"),
        ("weights", deployment.gpu_weights_bytes, f"{deployment.parameters / _GB:.2f} G parameters"),
        ("reserve", budget.reserve_bytes, "activations, CUDA context"),
        ("KV pool", pool.gpu_bytes, f"{pool.blocks:,} blocks of {deployment.block_tokens} tokens"),
    ]
    yield "Memory of each GPU"
    yield from _table(("", "GB", ""), ((name, _gb(amount), note) for name, amount, note in rows), "<><")


def _kv_groups(plan: Plan) -> Iterator[str]:
    deployment = plan.pool.deployment
    block_bytes = deployment.gpu_block_bytes * deployment.tensor_parallel
    groups_of: dict[int | None, list[KvGroupSpec]] = {}
    for group in deployment.groups:
        groups_of.setdefault(group.window_tokens, []).append(group)
    rows = [
        (
            f"{sum(len(group.layers) for group in groups):,}",
            f"{len(groups):,}",
            "all tokens" if window is None else f"the last {window:,} tokens",
            f"{len(groups) * block_bytes / deployment.block_tokens:,.0f}",
            _size(deployment.decoding_blocks(plan.context_tokens, groups) * block_bytes),
        )
        for window, groups in groups_of.items()
    ]
    yield f"KV of a sequence: {deployment.token_bytes:,.0f} bytes for each further token"
    yield from _table(("layers", "groups", "keep", "bytes/token", "in all"), rows, ">><>>")


def _decode(plan: Plan) -> Iterator[str]:
    gpu = plan.gpu
    yield (
        f"Decode at {gpu.memory_bytes_per_s / _GB:,.0f} GB/s and {gpu.flops_per_s / 1e12:,.0f} TFLOP/s a GPU "
        "(a roof, not a forecast)"
    )
    rows = [
        (
            f"{step.batch:,}",
            f"{1000 * step.step_s:,.2f}",
            f"{step.tokens_per_s:,.0f}",
            f"{step.tokens_per_s / step.batch:,.1f}",
            step.bound,
        )
        for step in plan.steps
    ]
    yield from _table(("batch", "step ms", "tokens/s", "each", "bound by"), rows, ">>>><")


def _parallel(plan: Plan) -> Iterator[str]:
    yield "Tensor parallel"
    rows = [
        (
            str(option.tensor_parallel),
            _gb(option.gpu_weights_bytes),
            _gb(option.gpu_pool_bytes) if option.gpu_pool_bytes > 0 else "-",
            f"{option.headroom:.0%}" if option.headroom > 0 else "-",
            f"{option.max_sequences:,}" if option.max_sequences else "does not fit",
            f"{option.max_sequences / option.tensor_parallel:,.1f}" if option.max_sequences else "",
        )
        for option in plan.options
    ]
    heads = ("GPUs", "weights GB", "KV GB", "left for KV", "sequences", "per GPU")
    yield from _table(heads, rows, ">>>>>>")
    if plan.advised is not None:
        yield f"Advice: {plan.advised.tensor_parallel}, {_reason(plan)}."


def _reason(plan: Plan) -> str:
    assert plan.advised is not None
    share = f"{plan.advised.headroom:.0%} of the memory left for KV"
    if plan.advised == next(option for option in plan.options if option.max_sequences):
        return f"the least that holds the model, with {share}"
    return f"the least with enough room, {share}; with less each GPU mostly repeats weights"


def _preemption(plan: Plan) -> Iterator[str]:
    weighed, gpu = plan.preemption, plan.gpu
    yield f"A preempted sequence of {plan.context_tokens:,} tokens"
    rows = [
        ("recompute", _ms(weighed.recompute_s), f"{plan.context_tokens / weighed.recompute_s:,.0f} tokens/s"),
        ("swap out and in", _ms(weighed.swap_s), f"{gpu.link_bytes_per_s / _GB:,.0f} GB/s to the host"),
    ]
    yield from _table(("", "ms", ""), rows, "<><")
    yield (
        f"Advice: --preemption-mode {weighed.mode}; both are even at "
        f"{weighed.even_link_bytes_per_s / _GB:,.1f} GB/s to the host."
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], sides: str) -> Iterator[str]:
    """Yield aligned lines: "<" puts a column to the left, ">" to the right. Empty heads get no line."""
    lines = [heads, *rows] if any(heads) else [*rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(sides))]
    for line in lines:
        cells = (f"{cell:{side}{width}}" for cell, side, width in zip(line, sides, widths, strict=True))
        yield f"  {'  '.join(cells)}".rstrip()


def _gb(amount: float) -> str:
    return f"{amount / _GB:,.1f}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f}"


def _size(amount: float) -> str:
    return f"{amount / _GB:,.2f} GB" if amount >= _GB / 10 else f"{amount / 1e6:,.2f} MB"
