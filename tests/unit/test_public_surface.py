"""What operators and clients depend on: tests/public_surface.txt against the code, section by section."""

from __future__ import annotations

import pytest

from tests.surface import SECTIONS
from tests.surface_file import check_section


@pytest.mark.parametrize("section", SECTIONS)
def test_the_public_surface_is_what_its_file_says(section: str) -> None:
    """What is added to or removed from the surface is a line of the file's diff."""
    check_section(section, SECTIONS[section]())
