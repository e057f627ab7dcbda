"""Training of the packaged tokenizer: `python -m tests.support.tokenization.train_tiny` writes its file.

Byte-level BPE on the prose that comes with Python: pydoc's topics and docstrings of the library. The file in
the repository was trained with Python 3.11. Run by hand only, because a new vocabulary is a new model.
"""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data import topics

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tokenization import TINY_DIRECTORY

VOCAB_SIZE = 4096
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Words with a leading space, up to three digits, runs of punctuation, line feeds, other whitespace.
_WORDS = r" ?\p{L}+('\p{L}+)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s*\n+|\s+(?!\S)|\s+"


def train() -> Tokenizer:
    """Train the tokenizer on the prose of the running Python version."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_prose(), trainer)
    return tokenizer


def _prose() -> Iterator[str]:
    yield from topics.topics.values()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (
                text := ast.get_docstring(node)
            ):
                yield text


if __name__ == "__main__":
    train().save(str(TINY_DIRECTORY / "tokenizer.json"), pretty=False)
