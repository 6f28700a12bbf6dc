"""A Sphinx extension: pages with the package's source, by sphinx.ext.viewcode, without dead links.

viewcode lists modules that have no source (of builtins and named tuples). Its links back to the
description take all names of a file to be described under one module, such as `spmdflow.Batch`.
"""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

_LINK_BACK = re.compile(r'(?<=<a class="viewcode-back" href=")([^"#]*)#([^"]*)')


def setup(app: Sphinx) -> dict[str, bool]:
    """Load viewcode and correct what it makes."""
    app.setup_extension("sphinx.ext.viewcode")
    app.connect("html-collect-pages", _drop_modules_without_source, priority=100)
    app.connect("html-page-context", _repair_links_back)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _drop_modules_without_source(app: Sphinx) -> list[tuple[str, dict[str, Any], str]]:
    """Drop them before viewcode lists them; return no pages, as this event wants a list of some."""
    modules = getattr(app.env, "_viewcode_modules", {})
    for name, entry in list(modules.items()):
        if not entry:
            del modules[name]
    return []


def _repair_links_back(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object
) -> None:
    """Link to the name in its own module if it is not described as one of the whole package.

    Any: a context holds what a template may use. template, doctree: of no use here.
    """
    if not page.startswith("_modules/spmdflow/"):
        return
    described = app.env.domaindata["py"]["objects"]
    module = page.removeprefix("_modules/").replace("/", ".")

    def repaired(link: re.Match[str]) -> str:
        if link[2] in described:
            return link[0]
        return f"{link[1]}#{module}.{link[2].removeprefix('spmdflow.')}"

    context["body"] = _LINK_BACK.sub(repaired, context["body"])
