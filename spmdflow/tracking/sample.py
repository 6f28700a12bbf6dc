"""`SampleTable`: prompts, responses and scores, readable in a terminal and in a log file.

Texts come from a model, so nothing in them may reach the terminal as a command: control,
format and unassigned characters are shown as escapes, and markup is not interpreted.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import NamedTuple, TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text


class Sample(NamedTuple):
    """One row of the table and of samples.jsonl."""

    prompt: str
    response: str
    score: float
    terms: Mapping[str, float | str | None] = MappingProxyType({})
    """What the score is made of, and what else the functions returned."""


class SampleTable:
    """Prints a few samples every so many steps.

    As wide as the terminal; in a log, COLUMNS or 80.
    """

    def __init__(
        self,
        every: int,
        *,
        num_rows: int = 5,
        max_characters: int = 240,
        file: TextIO | None = None,
        width: int | None = None,
    ) -> None:
        """every: steps between tables, 0 for none; file: stderr if None."""
        self.every = every
        self._num_rows, self._max_characters = num_rows, max_characters
        self._console = Console(file=file, stderr=file is None, width=width)

    def is_due(self, step: int) -> bool:
        """Whether a table belongs to this step."""
        return self.every > 0 and step % self.every == 0

    def show(self, step: int, samples: Sequence[Sample]) -> None:
        """Print the first samples as a table."""
        shown = islice(samples, self._num_rows)
        self._console.print(_table(f"samples of step {step}", shown, self._max_characters))


def printable(text: str) -> str:
    """text with every character that is not plainly visible as its escape, on one line."""
    return "".join(
        repr(character)[1:-1] if _is_hidden(character) else character for character in text
    )


def shortened(text: str, max_characters: int) -> str:
    """text, or its beginning and end with " ... " between, at most max_characters long."""
    gap = " ... "
    if len(text) <= max_characters or max_characters <= len(gap):
        return text[:max_characters]
    room = max_characters - len(gap)
    return text[: room - room // 2] + gap + text[len(text) - room // 2 :]


def _is_hidden(character: str) -> bool:
    """Control, format, surrogate, private, unassigned; separators but the space."""
    kind = unicodedata.category(character)
    return kind.startswith("C") or kind in ("Zl", "Zp") or (kind == "Zs" and character != " ")


def _table(title: str, samples: Iterable[Sample], max_characters: int) -> Table:
    table = Table(title=title, title_justify="left", box=box.ASCII2, show_lines=True, expand=True)
    table.add_column("prompt", ratio=2, overflow="fold")
    table.add_column("response", ratio=3, overflow="fold")
    table.add_column("score", justify="right", no_wrap=True)
    for sample in samples:
        texts = (
            Text(shortened(printable(text), max_characters))
            for text in (sample.prompt, sample.response)
        )
        table.add_row(*texts, f"{sample.score:.3g}")
    return table
