"""Multiply-accumulates that one generation executes with and without a KV cache.

The engine's decoder generates the same text twice: with a KV cache, one token per step, and without, the
whole text in every step. torch counts the operations by the sizes of its kernels' tensors. Blocks are
gathered, because torch cannot count inside the compiled paged attention kernel. Attention is the four
projections of each layer and the products of queries with keys and of weights with values. The closed forms
for s tokens and width D are printed with it: 4sD^2 + 2s^2D per layer without the cache, 4D^2 + 2sD with it.
They hold for multi-head attention with one KV head per query head. The rest of the model (MLP, output head
for every token of the step) is counted separately.

    kvroute bench macs --layers 1 --width 64 --prompt-tokens 16 --steps 48

counts 41,829,376 for attention without a cache and 1,305,600 with one: 32.0 times.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.report import Report, options_of, options_parser
from model_server.attention import Attention, KvLayout, SdpaAttention, Span, StepMeta, Upload
from model_server.attention.heads import HeadNorms, Rotation
from model_server.model.decoder import Decoder
from model_server.model.weights import load_checkpoint
from model_server.shapes.shape import single_group

_HEADS = 4
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Step:
    """Operations that one step executed.

    Attributes:
        tokens: Length of the text before the step.
        next_token: Sampled token.
        attention_macs: Multiply-accumulates of the attention of all layers, including projections.
        other_macs: Multiply-accumulates of everything else.
    """

    tokens: int
    next_token: int
    attention_macs: int
    other_macs: int


def uncached_macs(tokens: int, width: int) -> int:
    """Return the closed form of one layer's attention over a whole text."""
    return 4 * tokens * width**2 + 2 * tokens**2 * width


def cached_macs(tokens: int, width: int) -> int:
    """Return the closed form of one layer's attention for the last token alone."""
    return 4 * width**2 + 2 * tokens * width


def new_model(width: int, layers: int) -> Decoder:
    """Return a random Llama with plain multi-head attention."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=_HEADS,
        num_key_value_heads=_HEADS,
    )
    with tempfile.TemporaryDirectory(prefix="kvroute-bench-") as directory:
        LlamaForCausalLM(config).save_pretrained(directory)
        return load_checkpoint(Path(directory), "float32", _CPU).model


def generate(
    model: Decoder, prompt: Sequence[int], steps: int, block_tokens: int, *, cached: bool
) -> list[Step]:
    """Continue a prompt greedily and count each step's operations.

    Args:
        model: Model with multi-head attention.
        prompt: Token ids.
        steps: Tokens to generate.
        block_tokens: Block size of the KV cache.
        cached: Keep the KV of all tokens; otherwise each step recomputes them.
    """
    blocks = -(-(len(prompt) + steps) // block_tokens)
    layout = KvLayout(single_group(model.shape.layers), blocks, block_tokens)
    text, done = list(prompt), 0
    pool = SdpaAttention(model.shape, layout, model.dtype, model.device)
    taken = []
    for _ in range(steps):
        span = Span(done, len(text) - done, [range(blocks)])
        logits, macs = _forward(model, pool, text, span)
        taken.append(Step(len(text), int(logits.argmax()), macs["attention"], macs["other"]))
        done = len(text) if cached else 0
        text.append(taken[-1].next_token)
    return taken


@torch.inference_mode()
def _forward(model: Decoder, pool: Attention, text: Sequence[int], span: Span) -> tuple[Tensor, Counter[str]]:
    """Return the last token's logits, and the operations executed for all tokens of the span."""
    counted = _CountedAttention(pool)
    # Request logits of all rows: otherwise the last layer computes only the last token's.
    rows = torch.arange(span.length)
    with _CountedLinears(model.shape.hidden, counted.macs):
        logits = model.forward(
            torch.tensor(text[span.start : span.stop]), rows, counted, counted.prepare([span])
        )
    return logits[-1], counted.macs


class _CountedAttention:
    """KV cache that counts the operations of attention."""

    is_capturable = False

    def __init__(self, pool: Attention) -> None:
        self._pool = pool
        self.macs: Counter[str] = Counter()

    def prepare(self, spans: Sequence[Span], upload: Upload | None = None) -> StepMeta:
        """Lay out the blocks of one step."""
        return self._pool.prepare(spans, upload)

    def rotate_and_store(
        self, layer: int, projected: Tensor, rotation: Rotation, norms: HeadNorms | None, meta: StepMeta
    ) -> Tensor:
        """Write keys and values."""
        return self._pool.rotate_and_store(layer, projected, rotation, norms, meta)

    def attend(self, query: Tensor, layer: int, meta: StepMeta) -> Tensor:
        """Attend and count the operations."""
        return _counted(self.macs, "attention", lambda: self._pool.attend(query, layer, meta))

    def block_tensors(self) -> Sequence[Tensor]:
        """Return the tensors of the blocks."""
        return self._pool.block_tensors()


class _CountedLinears(TorchFunctionMode):
    """Counter of linear layers; attention's have the model's width on both sides, or 3x on one."""

    def __init__(self, width: int, macs: Counter[str]) -> None:
        super().__init__()
        self._shapes = ((3 * width, width), (width, width))
        self._macs = macs

    def __torch_function__(
        self,
        func: Callable[..., Any],
        _: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Run a torch function and count it."""
        kwargs = kwargs or {}
        if func is not functional.linear:
            return func(*args, **kwargs)
        part = "attention" if tuple(args[1].shape) in self._shapes else "other"
        return _counted(self._macs, part, lambda: func(*args, **kwargs))


def _counted(macs: Counter[str], part: str, work: Callable[[], Tensor]) -> Tensor:
    sums = {torch.ops.aten._embedding_bag_forward_only: _weighted_sum_flops}
    with FlopCounterMode(display=False, custom_mapping=sums) as counter:
        result = work()
    macs[part] += counter.get_total_flops() // 2  # FLOPs count a multiplication and an addition each
    return result


def _weighted_sum_flops(rows: Sequence[int], indices: Sequence[int], *_: object, **__: object) -> int:
    """Return the operations of summing, by weight, as many rows as there are indices."""
    return 2 * prod(indices) * rows[-1]


def _report(report: Report, layers: int, width: int, prompt_tokens: int, steps: int) -> None:
    model = new_model(width, layers)
    prompt = torch.randint(0, 512, (prompt_tokens,)).tolist()
    without, cached = (generate(model, prompt, steps, 1, cached=kept) for kept in (False, True))
    assert [step.next_token for step in without] == [step.next_token for step in cached], "not the same text"
    setting = {"layers": layers, "width": width, "prompt_tokens": prompt_tokens, "steps": steps}
    for name, taken, closed_form in (("uncached", without, uncached_macs), ("cached", cached, cached_macs)):
        last = taken[-1]
        forms = layers * closed_form(last.tokens, width)
        report.figure(
            f"attention_{name}_step_macs", "MAC", [last.attention_macs], tokens=last.tokens, **setting
        )
        report.figure(f"attention_{name}_by_closed_form", "x", [last.attention_macs / forms], **setting)
    totals = [sum(step.attention_macs for step in taken) for taken in (without, cached)]
    whole = [sum(step.attention_macs + step.other_macs for step in taken) for taken in (without, cached)]
    report.figure("attention_uncached_macs", "MAC", totals[:1], **setting)
    report.figure("attention_cached_macs", "MAC", totals[1:], **setting)
    report.figure("attention_macs_saved_ratio", "x", [totals[0] / totals[1]], **setting)
    report.figure("model_macs_saved_ratio", "x", [whole[0] / whole[1]], **setting)


def main() -> int:
    """Count and print all figures."""
    parser = options_parser(__doc__)
    sizes = {"layers": 4, "width": 256, "prompt-tokens": 128, "steps": 32}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    read = parser.parse_args()
    options = options_of(read)
    options.report.machine()
    if read.quick:
        read.width, read.prompt_tokens, read.steps = 64, 16, 4
    _report(options.report, read.layers, read.width, read.prompt_tokens, read.steps)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
