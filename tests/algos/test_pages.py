"""Every code block of the pages for users is run, from an empty folder, as a reader would."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.algos.runs import LIMIT
from tests.pages import ROOT, blocks_of, run_page

PAGES = sorted(
    page
    for name in (
        "COLUMNS",
        "DATA",
        "EMBEDDING",
        "INSTALL",
        "METRICS",
        "OWN_ALGORITHM",
        "OWN_ENGINE",
        "TROUBLESHOOTING",
    )
    if (page := ROOT / "docs" / f"{name}.md").exists()
)
LONG = ("DATA", "EMBEDDING", "OWN_ALGORITHM", "OWN_ENGINE")
"""Pages whose blocks take longest: drills."""


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.drill if page.stem in LONG else [], id=page.stem)
        for page in PAGES
    ],
)
def test_every_block_of_the_page_runs(page: Path, tmp_path: Path) -> None:
    assert run_page(page, tmp_path, seconds=LIMIT) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_that_are_left_out_say_why(page: Path) -> None:
    silent = [
        f"{block.page}:{block.line}"
        for block in blocks_of(page)
        if block.language in ("bash", "python", "sh") and not block.is_run and not block.skipped
    ]

    assert silent == []
