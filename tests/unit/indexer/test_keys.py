"""Block keys: dependence on tokens, model, adapter, salt, seed and extras."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.errors import TokenError
from indexer.keys import BlockHasher, token_words

HASHER = BlockHasher(4, seed=1)
ROOT = HASHER.root("m")
TOKENS = list(range(16))

token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def test_only_full_blocks_have_keys() -> None:
    """Only full blocks have keys; a prompt shorter than a block has none."""
    assert [len(HASHER.chain(ROOT, TOKENS[:count])) for count in (0, 3, 4, 7, 8, 15)] == [0, 0, 1, 1, 2, 3]


@given(token_lists, st.integers(0, 40))
def test_a_chain_can_be_continued_from_any_block(tokens: list[int], cut: int) -> None:
    """Hashing a prompt in two runs gives the same keys as in one."""
    whole = HASHER.chain(ROOT, tokens)
    cut = min(cut, len(whole))
    head = HASHER.chain(ROOT, tokens[: cut * 4])
    tail = HASHER.chain(int(head[-1]) if cut else ROOT, tokens[cut * 4 :])
    assert [*head, *tail] == whole.tolist()


@given(token_lists, token_lists)
def test_keys_agree_exactly_on_the_common_prefix(first: list[int], second: list[int]) -> None:
    """Two prompts share exactly the keys of their common prefix."""
    common = 0
    while common < min(len(first), len(second)) and first[common] == second[common]:
        common += 1
    keys, others = HASHER.chain(ROOT, first).tolist(), HASHER.chain(ROOT, second).tolist()
    assert keys[: common // 4] == others[: common // 4]
    assert not set(keys[common // 4 :]) & set(others[common // 4 :])


def test_keys_depend_on_model_adapter_salt_and_seed() -> None:
    """Model, adapter, salt and seed each change the keys, and equal names of two kinds differ."""
    roots = [
        HASHER.root("m"),
        HASHER.root("x"),
        HASHER.root("m", "x"),
        HASHER.root("m", None, "x"),
        HASHER.root("m", ""),
        HASHER.root("mx"),
        HASHER.root("m", "x", "x"),
        BlockHasher(4, seed=2).root("m"),
    ]
    assert len(set(roots)) == len(roots)
    assert len({HASHER.chain(root, TOKENS)[-1] for root in roots}) == len(roots)


def test_extras_change_their_block_and_all_after_it() -> None:
    """A block's extras change its own key and those after it, not those before."""
    plain = HASHER.chain(ROOT, TOKENS)
    marked = HASHER.chain(ROOT, TOKENS, [b"", b"image", b"", b""])
    assert plain[0] == marked[0]
    assert not set(plain[1:]) & set(marked[1:])


def test_the_seed_changes_blocks_as_well_as_roots() -> None:
    """Different seeds give different keys even after the same parent."""
    assert BlockHasher(4, seed=2).chain(ROOT, TOKENS)[0] != HASHER.chain(ROOT, TOKENS)[0]


def test_keys_are_stable() -> None:
    """Keys stay the same across releases, as peers and snapshots with the same seed require."""
    hasher = BlockHasher(16, seed=0)
    assert hasher.chain(hasher.root("kvroute-tiny"), range(32)).tolist() == [
        10686315764321863218,
        13883864358878926266,
    ]
    assert hasher.chain(hasher.root("kvroute-tiny"), range(32), [b"image", b""]).tolist() == [
        17854700471916274726,
        18072826180305326043,
    ]


def test_an_array_of_tokens_gives_the_same_keys() -> None:
    """A uint32 array gives the same keys as a list of the same numbers."""
    buffer = np.array(TOKENS, np.uint32)
    assert token_words(buffer) is buffer
    assert HASHER.chain(ROOT, buffer).tolist() == HASHER.chain(ROOT, TOKENS).tolist()


@pytest.mark.parametrize("tokens", [[-1] * 4, [2**32] * 4, [1.5] * 4, ["1"] * 4, [None] * 4])
def test_invalid_token_ids_are_rejected(tokens: list[int]) -> None:
    """An invalid token id raises TokenError instead of giving a wrong key."""
    with pytest.raises(TokenError):
        HASHER.chain(ROOT, tokens)


def test_any_text_can_be_a_name() -> None:
    """A lone surrogate, which JSON allows, is hashed like any other text."""
    assert HASHER.root("m", None, "\ud800") != HASHER.root("m", None, "\udfff")
