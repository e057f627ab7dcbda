"""The compiled CPU kernel for single tokens: exact, deterministic, and independent of masked positions."""

import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numba
import pytest
import torch
from torch import Tensor

from common.kernel_cache import cache_directory
from model_server.attention import KvLayout, SdpaAttention, Span, new_attention
from model_server.attention.cpu_kernel.decodes import PagedDecodes, paged_fault
from model_server.model.weights import load_checkpoint
from model_server.shapes.shape import AttentionShape, single_group
from tests.support.model_server.model import (
    BLOCK_TOKENS,
    CPU,
    reference_logits,
    save_reference,
    span,
    step,
    text_of,
)

pytestmark = pytest.mark.skipif(numba.config.DISABLE_JIT, reason="kernels are not compiled")

ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 1e-6}
CONTEXTS = [1, 2, 15, 16, 17, 63, 64, 65, 200]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Pool:
    """Pool with sequences of random tokens in blocks in random order, and one query per sequence."""

    def __init__(
        self,
        contexts: list[int],
        *,
        dtype: torch.dtype = torch.bfloat16,
        heads: int = 6,
        kv_heads: int = 2,
        head_dim: int = 64,
        block_tokens: int = 16,
        window: int | None = None,
    ) -> None:
        self.shape = AttentionShape(heads, kv_heads, head_dim, head_dim**-0.5, (window, window))
        needed = [-(-context // block_tokens) for context in contexts]
        generator = torch.Generator().manual_seed(1)
        order = (1 + torch.randperm(sum(needed), generator=generator)).tolist()
        layout = KvLayout(single_group(2), 1 + sum(needed), block_tokens)
        self.attention = SdpaAttention(self.shape, layout, dtype, CPU, paged=True)
        self.spans: list[Span] = []
        self.texts: list[Tensor] = []
        for context, blocks in zip(contexts, needed, strict=True):
            table, order = order[:blocks], order[blocks:]
            text = torch.randn((2, context, kv_heads, head_dim), generator=generator).to(dtype)
            meta = self.attention.prepare([span(0, context, table)])
            self.attention.store(1, *text, meta)
            self.spans.append(span(context - 1, 1, table))
            self.texts.append(text)
        self.queries = torch.randn((len(contexts), heads, head_dim), generator=generator).to(dtype)

    def attend(self, places: list[int]) -> Tensor:
        """Compute attention of some of the sequences in one step."""
        meta = self.attention.prepare([self.spans[place] for place in places])
        return self.attention.attend(self.queries[places], 1, meta)

    def exact(self, place: int) -> Tensor:
        """Compute the attention of a sequence in float64."""
        group, window = self.shape.heads // self.shape.kv_heads, self.shape.windows[1]
        seen = self.texts[place] if window is None else self.texts[place][:, -window:]
        key, value = seen.double().repeat_interleave(group, dim=2)
        scores = torch.einsum("hd,thd->ht", self.queries[place].double(), key) * self.shape.scale
        return torch.einsum("ht,thd->hd", scores.softmax(-1), value).flatten()


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(6, 2, 64), (8, 1, 32), (2, 2, 32), (7, 1, 96), (4, 2, 128), (3, 3, 256)],
)
@pytest.mark.parametrize(("block_tokens", "window"), [(16, None), (1, None), (5, 21), (100, 70), (16, 16)])
def test_outputs_are_exact_but_for_rounding(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, block_tokens: int, window: int | None
) -> None:
    """For any heads, blocks and windows, outputs equal the float64 result, rounded once."""
    pool = Pool(
        CONTEXTS,
        dtype=dtype,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_tokens=block_tokens,
        window=window,
    )
    got = pool.attend(list(range(len(CONTEXTS))))
    for place in range(len(CONTEXTS)):
        want = pool.exact(place)
        torch.testing.assert_close(
            got[place].double(), want, rtol=ROUNDING[dtype], atol=2 * ROUNDING[torch.float32]
        )


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("head_dim", [64, 32])
def test_results_do_not_depend_on_batch_or_threads(dtype: torch.dtype, head_dim: int) -> None:
    """Outputs are bitwise equal alone or among others, in any order, with any number of threads."""
    pool = Pool([*CONTEXTS, *CONTEXTS], dtype=dtype, head_dim=head_dim)
    places = list(range(2 * len(CONTEXTS)))
    torch.set_num_threads(1)
    alone = torch.cat([pool.attend([place]) for place in places])
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(pool.attend(places), alone)
        assert torch.equal(pool.attend(places[::-1]), alone.flip(0))
        assert torch.equal(pool.attend(places[3:7]), alone[3:7])


def test_only_attended_positions_matter() -> None:
    """NaN outside the attended positions changes nothing; within them it is visible."""
    pool = Pool([40], window=20, head_dim=32)
    clean = pool.attend([0])
    content, table = pool.attention.block_tensors()[0], pool.spans[0].block_tables[0]
    content[:, 0] = torch.nan  # pads block tables
    content[:, table[0]] = torch.nan  # positions 0-15 are before the window, as are 16-19
    content[:, table[1], :, :4] = torch.nan
    content[:, table[2], :, 8:] = torch.nan
    assert torch.equal(pool.attend([0]), clean)
    keys, values = content[1], content[3]
    for plane in (keys, values):
        for kv_head in range(2):
            before = plane[table[1], kv_head, 4, 31].clone()
            plane[table[1], kv_head, 4, 31] = torch.nan
            spoilt = pool.attend([0]).view(2, 3, 32).isnan()
            assert spoilt[kv_head].all() if plane is keys else spoilt[kv_head, :, 31].all()
            assert not spoilt[1 - kv_head].any()
            plane[table[1], kv_head, 4, 31] = before


def test_large_scores_neither_overflow_nor_vanish() -> None:
    """One dominant score gets the whole weight; equal large scores share it."""
    pool = Pool([100], dtype=torch.float32, heads=2, kv_heads=2, head_dim=32)
    keys, values = (pool.attention.block_tensors()[0][plane] for plane in (1, 3))
    table = pool.spans[0].block_tables[0]
    keys.zero_()
    keys[table[5], :, 3] = 1e4 * pool.queries[0].sign()
    torch.testing.assert_close(pool.attend([0])[0], values[table[5], :, 3].flatten())
    keys[:] = 1e4 * pool.queries[0].sign()[:, None, :]
    want = pool.texts[0][1].mean(dim=0).flatten()
    torch.testing.assert_close(pool.attend([0])[0], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("llama", {"head_dim": 32}),
        ("mistral", {"head_dim": 32, "sliding_window": 9}),
        ("qwen3", {"head_dim": 64}),
        (
            "gemma3",
            {"head_dim": 32, "num_hidden_layers": 7, "sliding_window": 9, "tie_word_embeddings": True},
        ),
    ],
    ids=str,
)
def test_logits_token_by_token_equal_transformers(
    tmp_path: Path, architecture: str, changes: dict[str, object]
) -> None:
    """A decoder with this attention gives transformers' logits, with prefills and decodes in one step."""
    reference = save_reference(tmp_path, architecture, **changes)
    model = load_checkpoint(tmp_path, "auto", CPU).model
    layout = KvLayout(single_group(model.shape.layers), 40, BLOCK_TOKENS)
    pool = SdpaAttention(model.shape, layout, model.dtype, CPU, paged=True)
    first, second = text_of(37, 1), text_of(30, 2)
    tables = [30, 2, 17, 9, 0, 31, 5, 12, 1, 20], [3, 4, 6, 7, 8, 10, 11, 13]
    got = [step(model, pool, [(first, span(0, 5, tables[0]))])]
    others = []
    for position in range(5, 37):
        parts = [(first, span(position, 1, tables[0]))]
        if position < 35:
            parts.append((second, span(position - 5, 1, tables[1])))
        both = step(model, pool, parts)
        got.append(both[:1])
        others.append(both[1:])
    torch.testing.assert_close(torch.cat(got), reference_logits(reference, first), atol=5e-4, rtol=1e-4)
    torch.testing.assert_close(torch.cat(others), reference_logits(reference, second), atol=5e-4, rtol=1e-4)


def test_unsupported_models_are_reported() -> None:
    """Unsupported devices, types and head sizes are reported, and rejected by the constructor."""
    shape = AttentionShape(heads=2, kv_heads=1, head_dim=32, scale=1.0, windows=(None,))
    assert paged_fault(shape, torch.bfloat16, CPU) is None
    faults = [
        paged_fault(shape, torch.bfloat16, torch.device("cuda")),
        paged_fault(shape, torch.float64, CPU),
        paged_fault(AttentionShape(2, 1, 34, 1.0, (None,)), torch.bfloat16, CPU),
        paged_fault(AttentionShape(4096, 1, 32, 1.0, (None,)), torch.bfloat16, CPU),
    ]
    words = ["not cuda", "torch.float64", "not 34", "4096 query heads"]
    for fault, word in zip(faults, words, strict=True):
        assert fault is not None
        assert word in fault
    layout = KvLayout(single_group(1), 4, 4)
    for refused in ({"dtype": torch.float64}, {"dtype": torch.bfloat16, "fp8": True}):
        with pytest.raises(ValueError, match=r"float64|8-bit"):
            SdpaAttention(shape, layout, device=CPU, paged=True, **refused)  # type: ignore[arg-type]


def test_float16_needs_a_processor_that_converts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without float16 conversion falls back to torch."""
    shape = AttentionShape(heads=2, kv_heads=1, head_dim=32, scale=1.0, windows=(None,))
    monkeypatch.setattr(numba.config, "CPU_FEATURES", "")
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    fault = paged_fault(shape, torch.float16, CPU)
    assert fault == ("this CPU has no float16 conversion (F16C)" if is_x86 else None)


def test_the_kernel_is_used_on_a_cpu_unless_compilation_is_off() -> None:
    """Decodes on a CPU use the kernel; without compilation they gather blocks, and the log says so."""
    shape = AttentionShape(heads=2, kv_heads=1, head_dim=32, scale=1.0, windows=(None,))
    made = new_attention(shape, KvLayout(single_group(1), 4, 4), torch.bfloat16, CPU)
    assert isinstance(made, SdpaAttention)
    assert isinstance(made.kernel, PagedDecodes)
    chosen, said = chosen_with(NUMBA_DISABLE_JIT="1")
    assert chosen == "NoneType"
    assert "NUMBA_DISABLE_JIT" in said


def test_a_kernel_that_cannot_be_loaded_is_not_used(tmp_path: Path) -> None:
    """A second start compiles nothing; a damaged cache file is logged."""
    Pool([1], heads=2, kv_heads=1, head_dim=32).attend([0])  # the first start, unless cached
    compiled, copy = cache_directory(numba.config.CACHE_DIR), cache_directory(str(tmp_path))
    assert compiled is not None
    assert copy is not None
    shutil.copytree(compiled, copy, dirs_exist_ok=True)
    written_ns = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*attend*")}
    assert written_ns
    assert chosen_with(NUMBA_CACHE_DIR=str(tmp_path)) == ("PagedDecodes", "")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*attend*")} == written_ns
    for kept in tmp_path.rglob("*attend*.nbi"):
        kept.write_bytes(b"damaged")
    chosen, said = chosen_with(NUMBA_CACHE_DIR=str(tmp_path))
    assert chosen == "NoneType"
    assert "UnpicklingError" in said


def test_a_kernel_with_other_numbers_than_torch_is_not_used() -> None:
    """At each start the kernel is compared with torch; a difference is logged."""
    spoil = """
from model_server.attention.cpu_kernel import decodes
attend = decodes.PagedDecodes.attend
def wrong(self, query, plane, plan, output):
    attend(self, query, plane, plan, output)
    output[:, 0] = output[:, 1]
decodes.PagedDecodes.attend = wrong
"""
    chosen, said = chosen_with(spoil)
    assert chosen == "NoneType"
    assert "differ from those of torch" in said


def chosen_with(before: str = "", **environment: str) -> tuple[str, str]:
    """Return the kernel that another process uses after running `before`, and its log."""
    program = """
import torch
from model_server.attention import KvLayout, new_attention
from model_server.shapes.shape import AttentionShape, single_group

shape, layout = AttentionShape(2, 1, 32, 1.0, (None,)), KvLayout(single_group(1), 4, 4)
print(type(new_attention(shape, layout, torch.bfloat16, torch.device("cpu")).kernel).__name__)
"""
    ended = subprocess.run(
        [sys.executable, "-c", before + program],
        env={"PYTHONPATH": ":".join(sys.path), **environment},
        check=True,
        capture_output=True,
        text=True,
    )
    return ended.stdout.strip(), ended.stderr
