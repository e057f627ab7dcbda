"""The public surface: tests/data/public_surface.txt compared with the code, section by section."""

from __future__ import annotations

import pytest

from tests.support.surface import SECTIONS
from tests.support.surface_file import check_section


@pytest.mark.parametrize("section", SECTIONS)
def test_the_public_surface_is_what_its_file_says(section: str) -> None:
    """Every addition to or removal from the surface shows in the file's diff."""
    check_section(section, SECTIONS[section]())
