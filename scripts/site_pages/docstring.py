"""The docstring of a script in algos/ as Markdown: paragraphs, the departures, the command."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass

_COMMAND = re.compile(r"\n\n((?: {4}[^\n]*\n?)+)\s*$")
_DEPARTURES = re.compile(r"Departures from (?P<source>the papers?|`[\w.]+`)(?P<more>[^:]*):\n")
_CODE = re.compile(
    r"docs/(?P<page>[A-Z_]+)\.md"
    r"|(?P<code>(?:\w+\.)+(?:py|yaml|jsonl)\b"  # a file
    r"|[a-z]\w*(?:\.[a-z]\w+)+(?::\w+)?(?:=[\w.-]*\w)?"  # a setting, a function: a.b, a.b:c, a.b=1
    r"|[a-z]+_\w+(?:=[\w.-]*\w)?)"  # a name with an underscore
)


@dataclass(frozen=True)
class ScriptText:
    """The parts of a script's docstring, each in Markdown except for the command."""

    title: str
    """The first line: the algorithm and its citation."""
    text: str
    """What follows, without the two below."""
    departures: str
    """The heading "Departures from ...", the numbered list and what follows it; may be empty."""
    command: str
    """A command line that starts the script."""


def script_text(docstring: str) -> ScriptText:
    """Return the parts of a docstring, whose words of code become code and whose pages links."""
    title, _, rest = docstring.strip().partition("\n")
    command = ""
    if found := _COMMAND.search(rest):
        command = textwrap.dedent(found[1]).strip()
        rest = rest[: found.start()]
    text = rest
    departures = ""
    if found := _DEPARTURES.search(rest):
        text = rest[: found.start()]
        heading = f"## Departures from {found['source']}"
        sentence = ""
        if found["more"].strip():  # more than the heading says
            sentence = _markdown(found[0].strip()) + "\n\n"
        numbered = _markdown(_with_gap_after_list(rest[found.end() :]))
        departures = f"{heading}\n\n{sentence}{numbered}"
    return ScriptText(_markdown(title), _markdown(text.strip()), departures, command)


def _with_gap_after_list(text: str) -> str:
    """The text with an empty line below the list that it begins with."""
    return re.sub(r"\A((?:(?:\d+\.| ) [^\n]*\n)+)(?=\S)", r"\1\n", text)


def _markdown(text: str) -> str:
    """Plain text with `code` as Markdown."""
    pieces = text.split("`")
    for place in range(0, len(pieces), 2):  # outside of backquotes
        pieces[place] = _escape_and_mark(pieces[place])
    return "`".join(pieces).strip()


def _escape_and_mark(text: str) -> str:
    """Mark names of code, link pages and escape what Markdown would read as markup."""
    result = []
    end = 0
    for found in _CODE.finditer(text):
        result.append(_escape(text[end : found.start()]))
        if found["page"]:
            result.append(f"[{found['page']}](../{found['page']}.md)")
        else:
            result.append(f"`{found['code']}`")
        end = found.end()
    result.append(_escape(text[end:]))
    return "".join(result)


def _escape(text: str) -> str:
    return re.sub(r"([*_<>\[\]$~{}\\])", r"\\\1", text)
