"""Links between pages: every relative link leads to a file, and every anchor to a heading of it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.paths import ROOT

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)
_FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_TOLD = re.compile(r"docs/[\w-]+\.md(?:#[\w-]+)?")
# Folders whose programs, alerts and notes name pages for users.
_NAMING = ("charts", "common", "indexer", "kvroute", "model_server", "planning", "router", "tokenization")


def listed(*patterns: str) -> list[Path]:
    """Return the files of the repository that match, without those that git ignores."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for path in map(ROOT.joinpath, done.stdout.splitlines()) if path.is_file()]


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return the anchors that code hosts give to a page's headings; equal headings are numbered."""
    found: dict[str, int] = {}
    names = []
    for heading in _HEADING.findall(_FENCE.sub("", page.read_text("utf-8"))):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        count = found.get(slug, 0)
        found[slug] = count + 1
        names.append(f"{slug}-{count}" if count else slug)
    return frozenset(names)


def broken(page: Path) -> Iterator[str]:
    """Yield the links of a page that lead nowhere."""
    text = _CODE.sub("", _FENCE.sub("", page.read_text("utf-8")))
    for target in _LINK.findall(text):
        if "://" in target or target.startswith("mailto:"):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            yield target


@pytest.mark.parametrize("page", listed("*.md"), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    """Each relative link of a page leads to a file, and each anchor to a heading."""
    assert list(broken(page)) == []


def test_every_page_that_a_program_names_exists() -> None:
    """Messages, alerts and notes name only pages and headings that exist."""
    wrong = {}
    for path in listed(*_NAMING):
        for told in _TOLD.findall(path.read_text("utf-8", "ignore")):
            name, _, anchor = told.partition("#")
            page = ROOT / name
            if not page.is_file() or (anchor and anchor not in anchors(page)):
                wrong[str(path.relative_to(ROOT))] = told
    assert wrong == {}


def test_the_table_of_contents_lists_every_page() -> None:
    """docs/index.md and mkdocs.yml list all pages of docs/."""
    pages = {path.name for path in listed("docs/*.md")} - {"index.md"}
    index, site = ((ROOT / name).read_text("utf-8") for name in ("docs/index.md", "mkdocs.yml"))
    assert {name for name in pages if f"({name})" not in index or f"docs/{name}" not in site} == set()
