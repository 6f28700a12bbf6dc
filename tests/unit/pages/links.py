"""Links of pages: which lead to no file, or to no place in it. For HTML and for Markdown."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

ELSEWHERE = ("http:", "https:", "mailto:", "data:")
_ANCHOR = re.compile(r'\bid="([^"]+)"')
_MARKDOWN_LINK = re.compile(r"\]\(([^)\s]+)\)")
_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ +(.+?)\s*$", re.MULTILINE)


class _Targets(HTMLParser):
    """Collects what a page links to or shows."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: set[str] = set()
        self.count = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value and tag != "use":
                self.targets.add(value)
                self.count += 1


def broken_links(pages: Iterable[Path]) -> tuple[list[str], int]:
    """Return ("page: target" for each broken link of HTML pages, number of links)."""
    broken = []
    count = 0
    for page in pages:
        parser = _Targets()
        parser.feed(page.read_text(encoding="utf-8"))
        count += parser.count
        broken += _broken(page, sorted(parser.targets), _html_anchors)
    return broken, count


def broken_markdown_links(page: Path) -> list[str]:
    """Return "page: target" for each broken link of a Markdown page."""
    targets = _MARKDOWN_LINK.findall(_CODE.sub("", page.read_text(encoding="utf-8")))
    return list(_broken(page, targets, _markdown_anchors))


def _broken(
    page: Path, targets: Iterable[str], anchors_of: Callable[[Path], frozenset[str]]
) -> Iterator[str]:
    """Yield "page: target" for each that does not exist. anchors_of: the places in a page."""
    for target in targets:
        if target.startswith(ELSEWHERE):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / unquote(path.partition("?")[0]) if path else page
        if not file.exists():
            yield f"{page}: {target}"
        elif anchor and file.suffix == page.suffix and unquote(anchor) not in anchors_of(file):
            yield f"{page}: {target}"


@cache
def _html_anchors(page: Path) -> frozenset[str]:
    return frozenset(_ANCHOR.findall(page.read_text(encoding="utf-8")))


@cache
def _markdown_anchors(page: Path) -> frozenset[str]:
    """The anchors that GitHub gives to the headings of a page."""
    text = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    anchors = set()
    for heading in _HEADING.findall(text):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchors.add(re.sub(r"[^\w\- ]", "", words).replace(" ", "-"))
    return frozenset(anchors)
