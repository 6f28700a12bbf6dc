"""A Sphinx extension: the list of pages at the left, from the titles of the pages alone.

Sphinx makes it from all headings of all pages, once for every page, and then drops the headings.
That took half of the time of a build.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from typing import Any

from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.builders import Builder
from sphinx.environment import BuildEnvironment


def setup(app: Sphinx) -> dict[str, bool]:
    """Replace the function `toctree` of every page, before the theme calls it."""
    app.connect("html-page-context", _set_toctree, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _set_toctree(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object
) -> None:
    """Any: a context holds what a template may use. template, doctree: of no use here."""
    context["toctree"] = lambda **options: "".join(_tree(app.env, app.builder, page))


def _tree(env: BuildEnvironment, builder: Builder, page: str) -> Iterator[str]:
    """The lists of the first page, each below its caption, in the classes that Sphinx gives."""
    above = _ancestors(env, page)
    for toctree in env.master_doctree.findall(addnodes.toctree):
        caption = html.escape(toctree.get("caption") or "")
        yield f'<p class="caption" role="heading"><span class="caption-text">{caption}</span></p>'
        yield from _entries(env, builder, page, above, toctree["entries"], 1)


def _ancestors(env: BuildEnvironment, page: str) -> set[str]:
    """The page and those whose lists lead to it."""
    above = {page}
    while True:
        more = set[str]()
        for parent, children in env.toctree_includes.items():
            if parent not in above and above.intersection(children):
                more.add(parent)
        if not more:
            return above
        above |= more


def _entries(
    env: BuildEnvironment,
    builder: Builder,
    page: str,
    above: set[str],
    entries: Sequence[tuple[str | None, str]],
    level: int,
) -> Iterator[str]:
    """A list of pages, each with the list of those below it."""
    yield "<ul>"
    for title, name in entries:
        current = " current" if name in above else ""
        link = builder.get_relative_uri(page, name) or "#"
        words = html.escape(title or env.titles[name].astext())
        yield f'<li class="toctree-l{level}{current}">'
        yield f'<a class="reference internal{current}" href="{html.escape(link)}">{words}</a>'
        below = [(None, child) for child in env.toctree_includes.get(name, [])]
        if below:
            yield from _entries(env, builder, page, above, below, level + 1)
        yield "</li>"
    yield "</ul>"
