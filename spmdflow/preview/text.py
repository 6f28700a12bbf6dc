"""Rows as lines of a terminal. The words are the same with and without colours.

A line begins with `>` if its tokens are trained on, then says what they are. Spaces separate the
tokens, so those of the text are shown as a dot. Texts may hold anything, so control, format and
unassigned characters are shown as escapes and never reach the terminal.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from rich.cells import cell_len
from rich.text import Text

from spmdflow.preview.row import Part, ShownRow, Token
from spmdflow.preview.section import Section
from spmdflow.tracking.progress import printable, shorten_text

SPACE = "\u00b7"
NEWLINE = "\u21b5"
TAB = "\u21e5"
CUT = "\ufffd"
_MARKS = {" ": SPACE, "\n": NEWLINE, "\t": TAB}
_TRAINED = ">"
_LABEL_WIDTH = 12
_NOTE_CHARACTERS = 400
_STYLES = {
    (True, True): "bold green",
    (True, False): "green",
    (False, True): "magenta",
    (False, False): "",
}
"""(is trained, is special) -> style of a token."""


def legend(width: int) -> list[Text]:
    """Return the lines that explain the marks of all others."""
    marks = f"{SPACE} space, {NEWLINE} line feed, {TAB} tab, {CUT} part of a character"
    text = (
        f"{_TRAINED} trained: the loss predicts these tokens. All others are only read. Spaces "
        f"separate tokens; a special token is one token. In a text: {marks}."
    )
    return [Text(line) for line in _wrap_words(text, width)]


def section_lines(section: Section, width: int) -> Iterator[Text]:
    """Yield the lines of a data section: its facts, its rows, and what the scan counted."""
    yield Text(section.title, "bold")
    for fact in section.facts:
        yield from (Text(f"  {line}") for line in _wrap_words(fact, width - 2))
    for row in section.rows:
        yield Text("")
        yield from row_lines(row, width)
    if section.counts:
        yield Text("")
    for count in section.counts:
        yield Text(count)


def row_lines(row: ShownRow, width: int) -> Iterator[Text]:
    """Yield the lines of a row: its title, text before its tokens, each part's tokens, its notes.

    width: columns of the terminal.
    """
    trained = sum(len(part.tokens) for part in row.parts if part.is_trained)
    yield Text(f"{row.title}: {row.num_tokens} tokens, {trained} trained", "bold")
    for label, text in row.text_before:
        yield _note_line(label, text)
    for part in row.parts:
        yield from part_lines(part, width)
    for label, text in row.notes:
        yield _note_line(label, text)


def _note_line(label: str, text: str) -> Text:
    return Text(f"  {label:<{_LABEL_WIDTH}}{shorten_text(printable(text), _NOTE_CHARACTERS)}")


def part_lines(part: Part, width: int) -> Iterator[Text]:
    """Yield the lines of a part. A line ends after a line feed, or where the terminal ends."""
    mark = _TRAINED if part.is_trained else " "
    for line in _broken_lines(part.tokens, width - _LABEL_WIDTH - 2):
        shown = Text(f"{mark} {part.label:<{_LABEL_WIDTH}}")
        for position, token in enumerate(line):
            if position:
                shown.append(" ")
            shown.append(token_text(token.text), _STYLES[part.is_trained, token.is_special])
        yield shown


def token_text(text: str) -> str:
    """Return a token's text without white space, with marks and escapes for what cannot be seen.

    A character of the text that is itself one of the marks is shown as its escape.
    """
    shown = []
    for character in text:
        if character in _MARKS:
            shown.append(_MARKS[character])
        elif character in _MARKS.values():
            shown.append(character.encode("unicode_escape").decode())
        else:
            shown.append(printable(character))
    return "".join(shown)


def _broken_lines(tokens: Iterable[Token], width: int) -> Iterator[list[Token]]:
    """Yield the tokens of each line. A token that is wider than a line has a line of its own."""
    line: list[Token] = []
    used = 0
    for token in tokens:
        size = cell_len(token_text(token.text)) + 1
        if line and used + size > width:
            yield line
            line = []
            used = 0
        line.append(token)
        used += size
        if token.text.endswith("\n"):
            yield line
            line = []
            used = 0
    if line:
        yield line


def _wrap_words(text: str, width: int) -> list[str]:
    """Return a sentence as lines; words, such as paths, stay whole."""
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
