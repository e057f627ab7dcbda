"""Public API of each package: what its `__init__` exports, and nothing else."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

PUBLIC = ("indexer", "indexer.peers", "router.h2", "tokenization")


@pytest.mark.parametrize("name", PUBLIC)
def test_all_names_what_a_package_exports(name: str) -> None:
    """`__all__` lists every public name that the package's `__init__` imports or defines, and no other."""
    package = importlib.import_module(name)
    members = {
        member
        for member, value in vars(package).items()
        if not member.startswith("_") and not isinstance(value, ModuleType) and member != "annotations"
    }
    assert members == set(package.__all__)
    assert len(package.__all__) == len(members)
