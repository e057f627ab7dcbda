"""The contract of attention: each backend gives what the definition gives, however a batch is built."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from model_server.attention import Attention, KvLayout, Span, new_attention
from model_server.attention.heads import HeadNorms, Rotation
from model_server.config import AttentionBackend
from model_server.errors import ConfigError
from model_server.shapes.shape import AttentionShape, KvGroupSpec, kv_groups, single_group

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
# In Triton's interpreter bfloat16 products are wrong, since numpy has no such type.
TRITON_DTYPES = [torch.bfloat16, torch.float16] if CUDA else [torch.float32, torch.float16]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
BACKENDS: list[tuple[AttentionBackend, torch.dtype]] = [
    ("torch", torch.float32),
    ("torch", torch.float16),
    *(("triton", dtype) for dtype in TRITON_DTYPES),
    *(() if CUDA else (("auto", torch.float32), ("auto", torch.bfloat16))),
]
# (sequence, tokens) by step: prefills, chunks and decodes, alone and mixed.
MIXED = [[(0, 7)], [(0, 1), (1, 5)], [(1, 13), (2, 3)], [(2, 1), (0, 1), (1, 18)]]
DECODES = [[(0, 33), (1, 2)], [(1, 1), (0, 1)], [(1, 1), (0, 1)]]


@dataclass(frozen=True, slots=True)
class Case:
    """One shape and batch.

    Attributes:
        heads: Query heads.
        kv_heads: KV heads.
        head_dim: Elements of a head.
        block_tokens: Tokens of a block.
        windows: Window by layer.
        steps: (sequence, tokens) by step.
        grouped: Whether layers of one window have block tables of their own.
        norms: Offset of the heads' norms; None: no norms.
    """

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    block_tokens: int = 16
    windows: tuple[int | None, ...] = (None,)
    steps: Sequence[Sequence[tuple[int, int]]] = field(default_factory=lambda: MIXED)
    grouped: bool = False
    norms: float | None = None


CASES = {
    "chunks": Case(),
    "windows": Case(windows=(None, 9, 1)),
    "groups of layers": Case(windows=(None, 9), grouped=True, block_tokens=4),
    "odd blocks": Case(block_tokens=5, windows=(None, 6)),
    "one head of three": Case(heads=3, kv_heads=1, steps=DECODES),
    "no shared heads": Case(heads=2, kv_heads=2, head_dim=64, steps=DECODES),
    "odd head size": Case(heads=6, head_dim=34, steps=DECODES),
    "norms": Case(norms=0.0, steps=DECODES),
    "norms with an offset": Case(norms=1.0, steps=DECODES),
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class Batches:
    """Random sequences of one case, and the definition's results.

    Attributes:
        shape: Shape of the case.
        layout: Layout of a pool that holds all sequences.
        norms: Norms of the heads.
    """

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        self.case, self.dtype = case, dtype
        self.shape = AttentionShape(case.heads, case.kv_heads, case.head_dim, 0.1, case.windows)
        groups: tuple[KvGroupSpec, ...] = (
            kv_groups(case.windows) if case.grouped else single_group(len(case.windows))
        )
        self.tokens = {number: 0 for step in case.steps for number, _ in step}
        for step in case.steps:
            for number, length in step:
                self.tokens[number] += length
        self.blocks = {number: -(-tokens // case.block_tokens) for number, tokens in self.tokens.items()}
        count = sum(self.blocks.values()) * len(groups)
        self.layout = KvLayout(groups, count + 1, case.block_tokens)
        generator = torch.Generator().manual_seed(3)
        order = torch.randperm(count, generator=generator).tolist()
        self.tables = {
            number: [[order.pop() for _ in range(blocks)] for _ in groups]
            for number, blocks in self.blocks.items()
        }
        size = case.heads + 2 * case.kv_heads, case.head_dim
        # By layer and sequence: queries, keys and values before the rotation.
        self.projected = [
            {
                number: torch.randn((tokens, *size), generator=generator).to(dtype)
                for number, tokens in self.tokens.items()
            }
            for _ in case.windows
        ]
        self.frequencies = torch.rand(case.head_dim // 2, generator=generator)
        self.norms = None
        if case.norms is not None:
            weights = torch.rand((2, case.head_dim), generator=generator).to(dtype).to(DEVICE)
            self.norms = HeadNorms(weights, 1e-6, case.norms)

    def run(self, attention: Attention) -> Iterator[tuple[Tensor, list[tuple[int, int, int, int]]]]:
        """Yield the outputs of each step and layer, with (layer, sequence, start, stop) of their rows."""
        done = dict.fromkeys(self.tokens, 0)
        for step in self.case.steps:
            step = sorted(step, key=lambda part: part[1] > 1)
            spans = [Span(done[number], length, self.tables[number]) for number, length in step]
            meta = attention.prepare(spans)
            positions = torch.tensor([at for span in spans for at in range(span.start, span.stop)])
            rotation = Rotation.of(positions.to(DEVICE), self.frequencies.to(DEVICE), 1.0, self.dtype)
            for layer, texts in enumerate(self.projected):
                rows = [
                    (number, span.start, span.stop) for (number, _), span in zip(step, spans, strict=True)
                ]
                projected = torch.cat([texts[number][start:stop] for number, start, stop in rows]).to(DEVICE)
                query = attention.rotate_and_store(layer, projected, rotation, self.norms, meta)
                yield attention.attend(query, layer, meta).cpu(), [(layer, *row) for row in rows]
            for number, length in step:
                done[number] += length

    def defined(self, layer: int, number: int, start: int, stop: int) -> Tensor:
        """Return the attention of some tokens by its definition, in float64."""
        case, projected = self.case, self.projected[layer][number][:stop].double()
        query, key, value = projected.split([case.heads, case.kv_heads, case.kv_heads], dim=1)
        if self.norms is not None:
            query, key = (
                heads
                / (heads.square().mean(-1, keepdim=True) + 1e-6).sqrt()
                * (weight.cpu().double() + case.norms)
                for heads, weight in zip((query, key), self.norms.weights, strict=True)
            )
        angles = torch.arange(stop)[:, None, None] * self.frequencies.double()
        query, key = (_turned(heads, angles) for heads in (query, key))
        outputs = []
        for position in range(start, stop):
            window = case.windows[layer]
            seen = slice(0 if window is None else max(0, position + 1 - window), position + 1)
            keys, values = (
                part[seen].repeat_interleave(case.heads // case.kv_heads, 1) for part in (key, value)
            )
            weights = (torch.einsum("hd,khd->hk", query[position], keys) * self.shape.scale).softmax(-1)
            outputs.append(torch.einsum("hk,khd->hd", weights, values).flatten())
        return torch.stack(outputs)


def _turned(heads: Tensor, angles: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    cosine, sine = angles.cos(), angles.sin()
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("backend", "dtype"), BACKENDS, ids=lambda value: str(value).removeprefix("torch."))
def test_each_backend_follows_the_definition(
    backend: AttentionBackend, dtype: torch.dtype, case: str
) -> None:
    """Outputs equal the definition's within the rounding of the type."""
    batches = Batches(CASES[case], dtype)
    attention = new_attention(batches.shape, batches.layout, dtype, DEVICE, backend=backend)
    for outputs, rows in batches.run(attention):
        want = torch.cat([batches.defined(*row) for row in rows])
        torch.testing.assert_close(outputs.double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("case", ["windows", "odd blocks", "norms"])
@pytest.mark.parametrize("dtype", TRITON_DTYPES, ids=str)
def test_8_bit_pools_are_the_same_by_every_backend(dtype: torch.dtype, case: str) -> None:
    """Triton kernels write the numbers and scales that torch writes, and attend to what they mean."""
    batches = Batches(CASES[case], dtype)
    made = [
        new_attention(batches.shape, batches.layout, dtype, DEVICE, fp8=True, backend=backend)
        for backend in ("torch", "triton")
    ]
    for (want, _), (got, _) in zip(*(batches.run(attention) for attention in made), strict=True):
        # Where rounding differs in the last bit of a key, its 8-bit neighbour differs by a sixteenth.
        assert (got.double() - want.double()).abs().mean() < TOLERANCE[dtype]
    (content, scales), (other_content, other_scales) = (attention.block_tensors() for attention in made)
    unequal = (content.float() != other_content.float()).float().mean()
    assert unequal < (0.0005 if dtype == torch.float32 else 0.02)
    assert torch.equal(scales, other_scales) or unequal > 0


@pytest.mark.parametrize("dtype", TRITON_DTYPES, ids=str)
def test_padding_rows_write_nowhere_and_change_nothing(dtype: torch.dtype) -> None:
    """A sequence without context, which fills a captured batch, leaves the pool and other rows alone."""
    shape = AttentionShape(4, 2, 32, 0.3, (None,))
    layout = KvLayout(single_group(1), 4, 16)
    generator = torch.Generator().manual_seed(0)
    projected = torch.randn((3, 8, 32), generator=generator).to(dtype).to(DEVICE)
    outputs, pools = [], []
    for padding in (0, 2):
        attention = new_attention(shape, layout, dtype, DEVICE, backend="triton")
        spans = [Span(0, 1, [[2]]), *[Span(-1, 1, [[0]])] * padding]
        meta = attention.prepare(spans)
        count = 1 + padding
        rotation = Rotation.of(
            meta.positions, torch.rand(16, generator=torch.Generator().manual_seed(1)).to(DEVICE), 1.0, dtype
        )
        query = attention.rotate_and_store(0, projected[:count], rotation, None, meta)
        outputs.append(attention.attend(query, 0, meta)[:1])
        pools.append(attention.block_tensors()[0])
    assert torch.equal(*outputs)
    assert torch.equal(*pools)


@pytest.mark.skipif(CUDA, reason="a GPU computes bfloat16 correctly")
def test_kernels_that_compute_wrongly_are_refused() -> None:
    """A trial on random numbers finds wrong results: those of bfloat16 in the interpreter."""
    shape, layout = AttentionShape(4, 2, 32, 0.1, (None,)), KvLayout(single_group(1), 4, 16)
    with pytest.raises(ConfigError, match="its results differ from those of torch"):
        new_attention(shape, layout, torch.bfloat16, DEVICE, backend="triton")


def test_contexts_of_many_parts_and_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes and prefills over several tiles of keys equal the definition, however contexts are divided."""
    attend = pytest.importorskip("model_server.attention.gpu_kernel.attend")
    monkeypatch.setattr(attend, "DECODE_PROGRAMS", 8)
    steps = [[(0, 150)], [(0, 1), (1, 70)], [(1, 1), (0, 1)]]
    batches = Batches(Case(kv_heads=1, steps=steps, windows=(None, 80)), torch.float32)
    attention = new_attention(batches.shape, batches.layout, torch.float32, DEVICE, backend="triton")
    for outputs, rows in batches.run(attention):
        want = torch.cat([batches.defined(*row) for row in rows])
        torch.testing.assert_close(outputs.double(), want, atol=2e-5, rtol=2e-5)
