"""A Sphinx extension: docstrings are plain text with `code`, and autodoc reads them as such.

Without it reStructuredText takes *, | and a trailing _ for markup, and an indented example for a
quotation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from sphinx.application import Sphinx

_MARKUP = re.compile(r"[*|\\]|_(?!\w)")
_DRAWN = ("|", "`-", "+-")
"""How a line of a table or of a drawn tree begins."""


def setup(app: Sphinx) -> dict[str, bool]:
    """Rewrite the lines of every docstring."""
    app.connect("autodoc-process-docstring", _process)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _process(
    app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]
) -> None:
    """Replace the lines in place, as this event wants it."""
    lines[:] = markup_of("\n".join(lines)).split("\n")


def markup_of(text: str) -> str:
    """Return plain text as reStructuredText: drawings and indented examples are shown as they are.

    Words between single backquotes stay code.
    """
    return "\n\n".join(_block(block) for block in re.split(r"\n(?:[ \t]*\n)+", text)) + "\n"


def _block(block: str) -> str:
    """One paragraph, list or example."""
    lines = block.split("\n")
    is_indented = all(line.startswith("    ") for line in lines)
    is_drawn = any(line.startswith(_DRAWN) for line in lines)
    if is_indented or is_drawn:
        return "\n".join(["::", "", *_indent(lines)])
    pieces = block.split("`")
    for place in range(0, len(pieces), 2):  # outside of backquotes
        pieces[place] = _MARKUP.sub(r"\\\g<0>", pieces[place])
    return "`".join(pieces)


def _indent(lines: list[str]) -> Iterator[str]:
    for line in lines:
        yield f"    {line}"
