"""The pages of docs/ as a site that is searched without a network, with pages made from the code.

Made here: a table of every setting from the schemas, a page for each script and for each learning
run, the API from the docstrings. The rest is docs/*.md as it is, without docs/STATUS.md;
docs/index.md is the order. Open build/site/index.html. Fails on a link that leads nowhere.

    python scripts/make_site.py [--out build/site]
    python scripts/make_site.py --draft     # a third of the time: no source pages, coarse pictures
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import shutil
import sys
import tempfile
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # also when started from elsewhere

import spmdflow  # noqa: E402
from scripts.learn.curves import draw, panels_of, table  # noqa: E402
from scripts.site_pages.docstring import script_text  # noqa: E402
from scripts.site_pages.plain_text import markup_of  # noqa: E402
from scripts.site_pages.settings import settings_page  # noqa: E402
from spmdflow.config.leaf import Leaf, defaults, leaves  # noqa: E402
from spmdflow.config.script import load_script, schema_of  # noqa: E402
from spmdflow.tracking.progress import printable  # noqa: E402

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "algos").glob("*.py"), key=lambda path: (path.stem != "ppo", path.stem))
OUTSIDE = ("STATUS.md",)
"""Pages of docs/ that are for the project itself and not on the site."""
CONF = """
project, html_title = "spmdflow", "spmdflow"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
extensions += ["scripts.site_pages.navigation", "scripts.site_pages.plain_text"]
html_theme, root_doc, default_role = "furo", "index", "code"
myst_heading_anchors = 4
autodoc_member_order, autodoc_typehints_format = "bysource", "short"
python_maximum_signature_line_length = 88
autodoc_class_signature = "separated"
html_theme_options = {"light_css_variables": {"code-font-size": "75%"}}
html_show_sphinx = html_show_copyright = html_copy_source = False
suppress_warnings = ["misc.highlighting_failure"]
"""
SOURCE_PAGES = """
extensions.append("scripts.site_pages.source_pages")
"""


def main() -> int:
    """Gather the pages, make the others, build; the exit code of Sphinx."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "site", help="folder")
    parser.add_argument("--draft", action="store_true", help="no source pages, coarse pictures")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        pages = gather(Path(name))
        (pages / "conf.py").write_text(CONF if options.draft else CONF + SOURCE_PAGES)
        write_settings(pages / "settings.md")
        write_scripts(pages)
        write_runs(pages, dpi=20 if options.draft else 200)
        write_api(pages)
        return build(pages, options.out, processes=1 if options.draft else 2)


def gather(folder: Path) -> Path:
    """The pages in a folder of their own, next to what they link to."""
    for path in ROOT.iterdir():
        if path.name not in ("docs", ".git", ".venv", "build", "runs"):
            (folder / path.name).symlink_to(path)
    ignored = shutil.ignore_patterns(*OUTSIDE)
    pages = Path(shutil.copytree(ROOT / "docs", folder / "docs", ignore=ignored))
    for path in pages.rglob("*.md"):
        path.write_text(path.read_text().replace("../CHANGELOG.md", "CHANGELOG.md"))
    text = (
        (ROOT / "CHANGELOG.md")
        .read_text()
        .replace("](docs/", "](")
        .replace("](algos/", "](../algos/")
    )
    # history: the search shows the pages that say how
    (pages / "CHANGELOG.md").write_text(f"---\nnosearch: true\n---\n{text}")
    return pages


def build(pages: Path, out: Path, *, processes: int) -> int:
    """HTML from the pages; warnings, such as a link that leads nowhere, are errors."""
    from sphinx.cmd.build import build_main

    strict = ["-q", "-W", "--keep-going"]
    trees = ["-d", str(pages.parent / "doctrees")]  # they are as large as the site
    return build_main([*strict, *trees, "-j", str(processes), str(pages), str(out)])


def write_settings(page: Path) -> None:
    """The table of the settings of all scripts."""
    page.write_text(settings_page(settings_of_scripts()))


def settings_of_scripts() -> dict[str, list[Leaf]]:
    """The settings of each script."""
    return {path.stem: list(leaves(defaults(schema_of(load_script(path))))) for path in SCRIPTS}


def write_scripts(pages: Path) -> None:
    """A page for each script: what it is, its `main`, its defaults, its learning run."""
    (pages / "scripts").mkdir()
    runs = {path.stem for path in (ROOT / "docs" / "learning").glob("*.json")}
    entries = {}
    for script in SCRIPTS:
        source = script.read_text()
        words = script_text(ast.get_docstring(ast.parse(source)) or "")
        body = source[source.index("def main(") :].rstrip()
        text = [f"# {script.stem}", words.title, words.text, f"```bash\n{words.command}\n```"]
        if script.stem in runs:
            text.append(f"Its learning run: [{script.stem}](../runs/{script.stem}.md).")
        text += ["## The algorithm", f"```python\n{body}\n```"]
        text += [f"The file: [algos/{script.name}](../../algos/{script.name})", words.departures]
        text += ["## Settings for its task", f"`{script.stem}.yaml`, which is next to the script:"]
        text.append(f"```yaml\n{script.with_suffix('.yaml').read_text().rstrip()}\n```")
        text.append("[Every setting](../settings.md) says what each key means.")
        (pages / "scripts" / f"{script.stem}.md").write_text("\n\n".join(text) + "\n")
        entries[script.stem] = words.title
    _write_list(pages / "scripts.md", "Scripts", entries)


def write_runs(pages: Path, *, dpi: int) -> None:
    """A page for each learning run: command, result, curve of this many dots per inch, cost."""
    (pages / "runs").mkdir()
    entries = {}
    for path in sorted((ROOT / "docs" / "learning").glob("*.json")):
        made: dict[str, Any] = json.loads(path.read_text())
        name = made["name"]
        entries[name] = f"{made['metric']}: {made['start']:.3f} -> {made['end']:.3f}"
        draw(panels_of([made]), pages / "runs" / f"{name}.png", dpi=dpi)
        cost = ", ".join(f"{seconds:.0f}" for seconds in made["cpu_seconds"]) or "not counted"
        text = [
            f"# {name}",
            f"```bash\n{_in_lines(made['command'])}\n```",
            table([made]).strip(),
            f"![curve]({name}.png)",
            *_samples(made.get("samples", ())),
            f"CPU seconds of each seed: {cost} ({made['hardware']}).",
            f"All points: [learning/{path.name}](../learning/{path.name}). The table of all runs: "
            f"[Learning](../LEARNING.md).",
        ]
        (pages / "runs" / f"{name}.md").write_text("\n\n".join(text) + "\n")
    _write_list(pages / "runs.md", "Runs that learned", entries)


def _in_lines(command: str) -> str:
    """A command for a shell, in lines that a page has room for."""
    lines = textwrap.wrap(
        command, 84, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
    return " \\\n".join(lines)


def _samples(samples: Sequence[Mapping[str, Mapping[str, Any]]]) -> Iterator[str]:
    """A block for each; a model's text stands in it as plain text."""
    if not samples:
        return
    yield "## Samples"
    if "chosen" in samples[0]:
        yield "Pairs that are in no data set, with their scores after training."
    else:
        yield "Held-out prompts, greedy: before the first step and after the last; (score)."
    for sample in samples:
        lines = []
        for name, told in sample.items():
            score = f"  ({told['score']:g})" if "score" in told else ""
            start = f"{name:<10}"
            more = " " * 10
            indents = {"initial_indent": start, "subsequent_indent": more}
            lines += textwrap.wrap(printable(told["text"]) + score, 86, **indents) or [start]
        yield "```text\n" + "\n".join(lines) + "\n```"


def write_api(pages: Path) -> None:
    """Every public name, and what the examples of OWN_ENGINE.md import, by module."""
    from sphinx.pycode import ModuleAnalyzer

    (pages / "api").mkdir()
    lines: list[str] = []
    homes: dict[str, list[str]] = defaultdict(list)
    for name in spmdflow.__all__:
        homes[spmdflow._HOMES[name]].append(name)
    example = (ROOT / "docs" / "OWN_ENGINE.md").read_text()
    for home, names in re.findall(r"^from (spmdflow\.[\w.]+) import (.+)$", example, re.M):
        homes[home] += [name for name in names.split(", ") if name not in homes[home]]
    for home, public in sorted(homes.items()):
        title = home.removeprefix("spmdflow.")
        text = [f"# {title}", "```{eval-rst}", f".. automodule:: {home}\n   :no-members:\n"]
        lines += [f"\n## [{title}](api/{home}.md)\n", "| name | |", "|---|---|"]
        for name in sorted(public):
            found = getattr(import_module(home), name)
            words = "\n".join(ModuleAnalyzer.for_module(home).find_attr_docs().get(("", name), []))
            path = f"{'spmdflow' if name in spmdflow.__all__ else home}.{name}"
            if words:  # a registry's decorator, an alias: the words below its definition
                indented = markup_of(words).replace("\n", "\n   ")
                module = path.rpartition(".")[0]
                text.append(f".. py:data:: {name}\n   :module: {module}\n\n   {indented}\n")
            elif isinstance(found, type):
                text.append(f".. autoclass:: {path}\n   :members:\n   :special-members: __call__\n")
            elif inspect.isroutine(inspect.unwrap(found)):
                text.append(f".. autofunction:: {path}\n")
            else:  # a constant without words
                continue
            line = _first_line(words or inspect.getdoc(found) or "")
            lines.append(f"| `{name}` | {line} |")
        (pages / "api" / f"{home}.md").write_text("\n".join([*text, "```"]) + "\n")
    tree = _tree(f"api/{home}" for home in sorted(homes))
    (pages / "api.md").write_text("\n".join(["# API", *lines, tree]))


def _write_list(page: Path, title: str, entries: Mapping[str, str]) -> None:
    """A page that lists the pages of the folder next to it: name -> a sentence."""
    rows = [f"| [{name}]({page.stem}/{name}.md) | {text} |" for name, text in entries.items()]
    tree = _tree(f"{page.stem}/{name}" for name in entries)
    page.write_text("\n".join([f"# {title}\n", "| | |", "|---|---|", *rows, tree]))


def _tree(names: Iterable[str]) -> str:
    names = "\n".join(names)
    return f"\n\n```{{toctree}}\n:hidden:\n\n{names}\n```\n"


def _first_line(text: str) -> str:
    return " ".join(text.partition("\n\n")[0].split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
