"""KV entries: a wrong or missing entry changes the logits exactly if it is visible to the next token."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model_server.attention import Attention, KvLayout, Span, new_attention
from model_server.config import AttentionBackend
from model_server.model.decoder import Decoder
from model_server.model.weights import load_checkpoint
from model_server.shapes.shape import KvGroupSpec, kv_groups, single_group
from tests.support.model_server.model import BLOCK_TOKENS, CPU, save_reference, step, text_of

CONTEXT_TOKENS = 22
BLOCKS = -(-(CONTEXT_TOKENS + 5) // BLOCK_TOKENS)
KEYS, VALUES = 0, 1
# Groups of unequal size.
GEMMA = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 9,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, slots=True)
class Case:
    """Model and KV pool of one case.

    Attributes:
        architecture: Architecture of the model.
        changes: Changes of its configuration.
        grouped: Whether layers with a sliding window have their own block tables.
        pool: "gathered", "fp8", "triton" or "triton fp8".
    """

    architecture: str = "llama"
    changes: dict[str, object] = field(default_factory=dict)
    grouped: bool = False
    pool: str = "gathered"


CASES = {
    "gathered": Case(),
    "gathered, windows": Case("mistral", {"sliding_window": 9}),
    "gathered, groups": Case("gemma3", GEMMA, grouped=True),
    "fp8": Case(pool="fp8"),
    "fp8, windows": Case("mistral", {"sliding_window": 9}, pool="fp8"),
    "fp8, groups": Case("gemma3", GEMMA, grouped=True, pool="fp8"),
    "triton": Case(pool="triton"),
    "triton fp8, windows": Case("mistral", {"sliding_window": 9}, pool="triton fp8"),
    "triton, groups": Case("gemma3", GEMMA, grouped=True, pool="triton"),
}


class Cached:
    """Text with cached KV, whose next tokens can be computed repeatedly."""

    def __init__(self, model: Decoder, groups: tuple[KvGroupSpec, ...], pool: Attention) -> None:
        self.model, self.groups, self.pool = model, groups, pool
        self.layout = KvLayout(groups, 1, BLOCK_TOKENS)
        self.text = text_of(CONTEXT_TOKENS + 5)
        self.tables = [list(range(group * BLOCKS, (group + 1) * BLOCKS)) for group in range(len(groups))]
        step(model, pool, [(self.text, Span(0, CONTEXT_TOKENS, self.tables))])

    def logits(self, length: int, tables: Sequence[Sequence[int]] | None = None) -> Tensor:
        """Return the logits of the next tokens."""
        span = Span(CONTEXT_TOKENS, length, tables or self.tables)
        return step(self.model, self.pool, [(self.text, span)])

    def row(self, layer: int, kind: int, position: int) -> Tensor:
        """Return a view of a token's keys or values of one head in the pool."""
        group, plane = self.layout.places()[layer]
        block, offset = self.tables[group][position // BLOCK_TOKENS], position % BLOCK_TOKENS
        content = self.pool.block_tensors()[0][kind * self.layout.num_planes + plane, block]
        return content[1, offset]

    def is_seen(self, layer: int, position: int) -> bool:
        """Return whether the next token attends to a position."""
        window = self.model.shape.windows[layer]
        return window is None or position > CONTEXT_TOKENS - window


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def cached(case: Case, directory: Path, device: torch.device = CPU, dtype: str = "auto") -> Cached:
    """Make a model and compute a text's KV."""
    head_dim = {"head_dim": 64} if device.type == "cuda" else {}
    save_reference(directory, case.architecture, **{**case.changes, **head_dim})
    model = load_checkpoint(directory, dtype, device).model  # type: ignore[arg-type]
    groups = kv_groups(model.shape.windows) if case.grouped else single_group(model.shape.layers)
    layout = KvLayout(groups, BLOCKS * len(groups) + 1, BLOCK_TOKENS)
    backend: AttentionBackend = "triton" if "triton" in case.pool else "torch"
    fp8 = "fp8" in case.pool
    pool = new_attention(model.shape, layout, model.dtype, device, fp8=fp8, backend=backend)
    return Cached(model, groups, pool)


def check_each_entry(subject: Cached, length: int, positions: range) -> None:
    """Negate entries one by one and check which change the logits."""
    want = subject.logits(length)
    for layer in range(subject.model.shape.layers):
        for kind in (KEYS, VALUES):
            for position in positions:
                row = subject.row(layer, kind, position)
                kept = row.clone()
                assert kept.float().abs().max() > 0, "there is nothing to be corrupted"
                row.copy_((-kept.float()).to(kept.dtype))
                changed = not torch.equal(subject.logits(length), want)
                row.copy_(kept)
                assert changed == subject.is_seen(layer, position), (layer, kind, position)
    assert torch.equal(subject.logits(length), want)


def check_each_block(subject: Cached, length: int) -> None:
    """Replace blocks by an empty one, one by one, and check which change the logits."""
    want, empty = subject.logits(length), BLOCKS * len(subject.groups)
    for number, group in enumerate(subject.groups):
        for index in range(CONTEXT_TOKENS // BLOCK_TOKENS):
            tables = [list(table) for table in subject.tables]
            tables[number][index] = empty
            last = (index + 1) * BLOCK_TOKENS - 1
            seen = any(subject.is_seen(layer, last) for layer in group.layers)
            assert torch.equal(subject.logits(length, tables), want) != seen, (number, index)


def some(name: str, positions: range) -> range:
    """Return some of the positions for cases that run in Triton's interpreter, which is slow."""
    return positions[:: 1 if "triton" not in name else 8]


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_entry_changes_the_next_token(tmp_path: Path, name: str) -> None:
    """A wrong key or value changes the logits of a decode, unless it is outside the window."""
    check_each_entry(cached(CASES[name], tmp_path), 1, some(name, range(CONTEXT_TOKENS)))


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_entry_changes_a_chunk(tmp_path: Path, name: str) -> None:
    """A wrong key or value changes the logits of a prefill chunk, unless it is outside the window."""
    check_each_entry(cached(CASES[name], tmp_path), 5, some(name, range(1, CONTEXT_TOKENS, 4)))


@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("name", CASES)
def test_a_missing_block_changes_the_logits(tmp_path: Path, name: str, length: int) -> None:
    """A missing block changes the logits, unless no layer of its group attends to it."""
    check_each_block(cached(CASES[name], tmp_path), length)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", CASES)
def test_every_entry_counts_on_cuda(tmp_path: Path, name: str) -> None:
    """On CUDA, wrong entries and missing blocks change the logits as on a CPU."""
    subject = cached(CASES[name], tmp_path, torch.device("cuda"), "bfloat16")
    check_each_entry(subject, 1, range(0, CONTEXT_TOKENS, 3))
    check_each_block(subject, 1)
