"""scripts/make_site.py: every setting, script, run and public name has its place on a page."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import make_site
import pytest

import spmdflow
from scripts.site_pages.docstring import script_text
from scripts.site_pages.plain_text import markup_of
from scripts.site_pages.settings import COLUMNS
from tests.unit.pages.links import broken_links

ROOT = Path(__file__).parents[3]
PAGES = ROOT / "docs"


@dataclass(frozen=True)
class Site:
    """A site that was built."""

    folder: Path
    status: int
    errors: str

    def words(self, page: str) -> str:
        """The text of a page."""
        return html.unescape(re.sub(r"<[^>]+>", "", (self.folder / page).read_text()))


def build(folder: Path, *options: str) -> Site:
    command = [sys.executable, str(ROOT / "scripts" / "make_site.py"), "--out", str(folder)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=800)
    return Site(folder, done.returncode, done.stderr)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """All pages but those with the package's source, and with coarse curves: 16 s of a core."""
    return build(tmp_path_factory.mktemp("draft") / "site", "--draft")


def cells_of(page: str) -> list[list[str]]:
    """The rows of the settings' table."""
    rows = re.findall(r'<tr id="[^"]+">(.*?)</tr>', page)
    return [
        [html.unescape(re.sub(r"<[^>]+>", "", cell)) for cell in re.findall(r"<td>(.*?)</td>", row)]
        for row in rows
    ]


def rows_of_key(rows: Sequence[Sequence[str]], key: str) -> list[Sequence[str]]:
    return [row for row in rows if row[0] == key]


def test_table_has_every_setting_of_every_script_with_its_type_default_and_sentence(
    tmp_path: Path,
) -> None:
    make_site.write_settings(page := tmp_path / "settings.md")

    text = page.read_text()
    rows = cells_of(text)
    settings = make_site.settings_of_scripts()
    keys = {leaf.key for leaves in settings.values() for leaf in leaves}
    assert {row[0] for row in rows} == keys and f"{len(keys)} settings" in text
    assert all(len(row) == len(COLUMNS) and row[1] and row[2] and row[3] for row in rows)
    assert rows_of_key(rows, "actor.optimizer.lr") == [
        [
            "actor.optimizer.lr",
            "float",
            "1e-05",
            "Peak learning rate. (more than 0)",
            "all but evaluate, reward_model",
        ]
    ]
    assert rows_of_key(rows, "max_staleness")[0][4] == "grpo_async"
    assert rows_of_key(rows, "run.seed")[0][4] == ""
    assert rows_of_key(rows, "run.sample_every")[0][2] == "10; 0 in evaluate"
    types = {row[1] for row in rows}
    assert {"int", "list of str", "map of name -> value", "one of all, matrices"} <= types
    assert not any(re.search(r"\b(any|dict|object)\b", name) for name in types)


def test_docstring_becomes_text_a_heading_with_a_list_and_a_command() -> None:
    text = script_text(
        "NAME: an algorithm (Nobody 2025).\n\nIt samples *twice*. Departures from the paper, with "
        "a_name=0:\n1. one, as docs/PLAN.md says;\n2. x.yaml has\n   advantage.kl_coef=0.\nAlso "
        "`that_one`.\n\n    torchrun a.py"
    )

    assert text.title == "NAME: an algorithm (Nobody 2025)."
    assert text.text == "It samples \\*twice\\*."
    assert text.departures == (
        "## Departures from the paper\n\nDepartures from the paper, with `a_name=0`:\n\n1. one, as "
        "[PLAN](../PLAN.md) says;\n2. `x.yaml` has\n   `advantage.kl_coef=0`.\n\nAlso `that_one`."
    )
    assert text.command == "torchrun a.py"


def test_docstring_of_the_package_is_plain_text_whose_examples_and_drawings_stay_as_they_are() -> (
    None
):
    text = "Mean of |a * b|, named cost_ or `x_*y`.\n\n    a *= b\n\nRoot\n|-- Leaf"

    assert markup_of(text) == (
        "Mean of \\|a \\* b\\|, named cost\\_ or `x_*y`.\n\n"
        "::\n\n        a *= b\n\n"
        "::\n\n    Root\n    |-- Leaf\n"
    )


def test_site_is_built_without_a_warning_and_has_every_page_but_those_outside(site: Site) -> None:
    assert (site.status, site.errors) == (0, "")  # a warning, such as a broken link, is an error

    pages = {str(page.relative_to(PAGES).with_suffix("")) for page in PAGES.rglob("*.md")}
    built = {str(page.relative_to(site.folder).with_suffix("")) for page in site.folder.rglob("*")}
    assert pages - built == {"STATUS"}


def test_every_link_of_the_site_leads_to_a_file_and_to_a_place_in_it(site: Site) -> None:
    pages = list(site.folder.rglob("*.html"))

    broken, count = broken_links(pages)

    assert broken == []
    assert count > 20_000


def test_script_pages_have_the_script_and_its_departures_as_text(site: Site) -> None:
    for script in make_site.SCRIPTS:
        source = script.read_text()
        page = f"scripts/{script.stem}.html"
        loop = source[source.index("def main(") :].splitlines()[-1].strip()
        assert loop in site.words(page)
        marked = (site.folder / page).read_text()
        assert re.search(r"<h2>Departures from .*?</h2>.*?<ol class=", marked, re.DOTALL), page


def test_run_pages_have_command_curve_and_samples(site: Site) -> None:
    for path in (PAGES / "learning").glob("*.json"):
        made = json.loads(path.read_text())
        page = f"runs/{made['name']}.html"
        assert made["command"] in site.words(page).replace(" \\\n   ", "")
        assert f"{made['name']}.png" in (site.folder / page).read_text()
        for sample in made.get("samples", ()):
            assert all(f"{name:<10}" in site.words(page) for name in sample)


def test_public_names_are_in_the_api_and_the_search_has_an_index(site: Site) -> None:
    reference = "".join(page.read_text() for page in (site.folder / "api").glob("*.html"))
    index = (site.folder / "searchindex.js").read_text()

    assert [name for name in spmdflow.__all__ if f'id="spmdflow.{name}"' not in reference] == []
    assert "kv_cach" in index and "settings" in index  # stems, as the search looks them up


def test_navigation_lists_all_pages_and_marks_the_one_that_is_shown(site: Site) -> None:
    page = (site.folder / "scripts" / "grpo.html").read_text()
    entries = re.findall(r'<a class="[^"]*reference internal[^"]*" href="([^"]*)"', page)
    current = re.findall(r'<li class="[^"]*current-page[^"]*">\s*<a [^>]*href="([^"]*)"', page)

    assert {"../settings.html", "ppo.html", "../api/spmdflow.workers.engine.html"} <= set(entries)
    assert current == ["#"]


def test_no_page_loads_anything_from_a_network(site: Site) -> None:
    loads = re.compile(r'<(script|link|img)[^>]+(src|href)="https?:')

    assert [page for page in site.folder.rglob("*.html") if loads.search(page.read_text())] == []


@pytest.mark.slow
def test_whole_site_also_has_source_pages_and_sharp_curves(tmp_path: Path) -> None:
    whole = build(tmp_path / "site")

    assert (whole.status, whole.errors) == (0, "")
    assert "class Flow" in whole.words("_modules/spmdflow/controller/flow.html")
    assert (whole.folder / "_images" / "ppo.png").stat().st_size > 20_000
    assert broken_links(list(whole.folder.rglob("*.html")))[0] == []
