"""The settings of all scripts as one table in HTML, with a box that filters its rows.

The box is a few lines of JavaScript in the page: it works from a disk, without a server.
`settings.html?filter=clip+actor` opens the page with the box filled in.
"""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from spmdflow.config.leaf import Leaf

COLUMNS = ("setting", "type", "default", "what it does", "scripts")
MOST_DEFAULTS = 4
"""Of a setting with more defaults than these, the table says that each script has its own."""
LONGEST_DEFAULT = 100
"""Characters of a default that the table shows at once."""
TOP_LEVEL = "top level"
"""Name of the section of settings without a dot."""

PAGE = """---
hide-toc: true
---

# Every setting

A setting is a key of the script's YAML, a `key=value` on the command line, and an attribute of
`cfg`. All three have the same name. The table has the {count} settings of the {num_scripts} bundled
scripts. Its defaults are those of the code. Next to a script is a YAML file with the values for its
bundled task; the [script's page](scripts.md) shows it. `spmdflow run SCRIPT --help` prints the
settings of one script, also of your own, with the values that a run would have. If the last column
is empty, all scripts have the setting.

```{{raw}} html
{style}
<div class="settings-filter">
<input type="search" id="settings-filter" placeholder="Filter, for example: actor lr"
 aria-label="Show only settings with these words" autocomplete="off">
<output id="settings-shown"></output>
</div>
<div class="table-wrapper docutils container">
<table class="docutils align-default" id="settings">
{rows}
</table>
</div>
{script}
```
"""
STYLE = """<style>
.main > .content { width: 100%; max-width: 84rem; }
.settings-filter { display: flex; gap: 1rem; align-items: baseline; margin: 1rem 0; }
.settings-filter input {
  flex: 0 1 26rem; padding: .4rem .6rem; font: inherit; color: inherit;
  background: var(--color-background-secondary);
  border: 1px solid var(--color-background-border); border-radius: .3rem;
}
.settings-filter output { color: var(--color-foreground-muted); }
#settings { font-size: .85rem; }
#settings td { vertical-align: top; padding: .2rem .5rem; overflow-wrap: break-word; }
#settings td:nth-child(3) { overflow-wrap: anywhere; min-width: 7rem; }
#settings td:nth-child(4) { min-width: 18rem; }
#settings td:nth-child(5) { min-width: 9rem; }
#settings tbody th { text-align: left; }
#settings tr:target { background: var(--color-highlight-on-target); }
</style>"""
SCRIPT = """<script>
const box = document.getElementById("settings-filter");
function applyFilter() {
  const words = box.value.toLowerCase().split(/\\s+/).filter(Boolean);
  let shown = 0;
  for (const body of document.querySelectorAll("#settings tbody")) {
    let shownHere = 0;
    for (const row of body.querySelectorAll("tr[id]")) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      shownHere += row.hidden ? 0 : 1;
    }
    body.hidden = shownHere === 0;
    shown += shownHere;
  }
  document.getElementById("settings-shown").textContent = shown + " rows";
}
box.value = new URLSearchParams(location.search).get("filter") || "";
box.addEventListener("input", applyFilter);
applyFilter();
</script>"""


@dataclass
class Row:
    """A setting as some scripts have it: with the same type, sentence and limits."""

    leaf: Leaf
    """It in the first of these scripts."""
    scripts: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Default -> the scripts that have it."""


def settings_page(settings: Mapping[str, Sequence[Leaf]]) -> str:
    """Return the page in Markdown. settings: those of each script, by its name."""
    rows = rows_of(settings)
    count = len({row.leaf.key for row in rows})
    return PAGE.format(
        count=count,
        num_scripts=len(settings),
        style=STYLE,
        rows="\n".join(_table(rows, list(settings))),
        script=SCRIPT,
    )


def rows_of(settings: Mapping[str, Sequence[Leaf]]) -> list[Row]:
    """Return the rows of the table, those of a section next to each other, top level first.

    A setting has a row for each type, sentence or limits that it has in some script.
    """
    rows: dict[tuple[str, ...], Row] = {}
    for script, leaves in settings.items():
        for leaf in leaves:
            facts = (leaf.key, leaf.type_text, leaf.doc, leaf.limits_text)
            row = rows.setdefault(facts, Row(leaf))
            row.scripts[leaf.default_text].append(script)
    sections = dict.fromkeys(_section(row.leaf.key) for row in rows.values())
    order = [TOP_LEVEL, *(name for name in sections if name != TOP_LEVEL)]
    keys = list(dict.fromkeys(row.leaf.key for row in rows.values()))
    return sorted(
        rows.values(),
        key=lambda row: (order.index(_section(row.leaf.key)), keys.index(row.leaf.key)),
    )


def _section(key: str) -> str:
    return key.partition(".")[0] if "." in key else TOP_LEVEL


def _table(rows: Sequence[Row], scripts: Sequence[str]) -> Iterator[str]:
    """The lines of the table: its head, and a body for each section."""
    heads = "".join(f"<th>{column}</th>" for column in COLUMNS)
    yield f"<thead><tr>{heads}</tr></thead>"
    section = ""
    seen = set[str]()
    for row in rows:
        if _section(row.leaf.key) != section:
            if section:
                yield "</tbody>"
            section = _section(row.leaf.key)
            yield f'<tbody><tr><th colspan="{len(COLUMNS)}">{section}</th></tr>'
        anchor = row.leaf.key
        while anchor in seen:  # the same setting with another sentence
            anchor += "-"
        seen.add(anchor)
        yield _line(row, anchor, scripts)
    yield "</tbody>"


def _line(row: Row, anchor: str, scripts: Sequence[str]) -> str:
    limits = f" ({row.leaf.limits_text})" if row.leaf.limits_text else ""
    having = [script for names in row.scripts.values() for script in names]
    cells = (
        f"<code>{html.escape(row.leaf.key).replace('.', '.<wbr>')}</code>",
        html.escape(row.leaf.type_text),
        _defaults(row),
        html.escape(row.leaf.doc + limits),
        _scripts(having, scripts),
    )
    columns = "".join(f"<td>{cell}</td>" for cell in cells)
    return f'<tr id="{html.escape(anchor)}">{columns}</tr>'


def _defaults(row: Row) -> str:
    """The default, or each default with the scripts that have it, the most common one first."""
    common = sorted(row.scripts, key=lambda default: -len(row.scripts[default]))
    if len(common) > MOST_DEFAULTS:
        return "each script has its own"
    texts = []
    for default in common:
        text = _value(default)
        if len(common) > 1 and default != common[0]:
            text += f" in {_links(row.scripts[default])}"
        texts.append(text)
    return "; ".join(texts)


def _value(default: str) -> str:
    """A default as code; a long one, such as a list of many texts, behind a word to click on."""
    if default == "required":
        return default
    code = f"<code>{html.escape(default)}</code>"
    if len(default) > LONGEST_DEFAULT:
        return f"<details><summary>show</summary>{code}</details>"
    return code


def _scripts(having: Sequence[str], scripts: Sequence[str]) -> str:
    """Which scripts have a row: nothing for all of them, otherwise the shorter of two lists."""
    others = [script for script in scripts if script not in having]
    if not others:
        return ""
    if len(others) < len(having):
        return f"all but {_links(others)}"
    return _links([script for script in scripts if script in having])


def _links(scripts: Sequence[str]) -> str:
    return ", ".join(f'<a href="scripts/{name}.html">{name}</a>' for name in scripts)
