"""Links between the repository's Markdown pages lead to a file, and to a heading in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.pages.links import broken_links, broken_markdown_links

ROOT = Path(__file__).parents[3]
MADE_BY_SITE = ("settings.md", "scripts.md", "runs.md", "api.md", "CHANGELOG.md", "scripts/")
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(ROOT / folder / "README.md" for folder in ("launch", "tests")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


@pytest.mark.parametrize(
    "page",
    PAGES,
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_links_of_the_page_lead_somewhere(page: Path) -> None:
    broken = [link.partition(": ")[2] for link in broken_markdown_links(page)]

    assert [link for link in broken if not link.startswith(MADE_BY_SITE)] == []


def test_link_to_no_file_or_no_heading_is_found(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text("# It's `one`\n\n[x](b.md) [y](#its-one) [z](#two) `[w](c.md)`\n")

    assert broken_markdown_links(page) == [f"{page}: b.md", f"{page}: #two"]


def test_link_of_a_site_to_no_file_or_no_place_is_found(tmp_path: Path) -> None:
    page = tmp_path / "a.html"
    page.write_text(
        '<p id="p"><a href="#p"></a><a href="#q"></a><img src="b.png"><a href="a.html#p">'
    )

    assert broken_links([page]) == ([f"{page}: #q", f"{page}: b.png"], 4)
