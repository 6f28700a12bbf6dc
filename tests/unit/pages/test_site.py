"""scripts/make_site.py: every setting, script, run and public name has its place on a page."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from pathlib import Path

import make_site
import pytest

import spmdflow
from spmdflow.config.leaf import defaults, leaves
from spmdflow.config.script import load_script, schema_of

ROOT = Path(__file__).parents[3]


def test_every_setting_of_every_script_has_a_heading_and_its_default(tmp_path: Path) -> None:
    make_site.write_settings(page := tmp_path / "settings.md")

    text = page.read_text()
    headings = re.findall(r"^### `(.+)`$", text, re.M)
    assert len(headings) == len(set(headings))
    keys = {
        leaf.key
        for script in make_site.SCRIPTS
        for leaf in leaves(defaults(schema_of(load_script(script))))
    }
    assert set(headings) == keys and f"{len(keys)} settings" in text
    entry = text.split("### `actor.optimizer.lr`")[1].split("###")[0]
    assert "Peak learning rate." in entry and "float, default" in entry


@pytest.mark.slow
def test_the_site_is_built_without_a_broken_link_and_has_everything(tmp_path: Path) -> None:
    out = tmp_path / "site"
    command = [sys.executable, str(ROOT / "scripts" / "make_site.py"), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert (done.returncode, done.stderr) == (
        0,
        "",
    )  # a warning, such as a broken link, is an error

    def words(page: str) -> str:
        return html.unescape(re.sub(r"<[^>]+>", "", (out / page).read_text()))

    for page in (ROOT / "docs").glob("*.md"):
        assert (out / f"{page.stem}.html").exists(), page
    for script in make_site.SCRIPTS:
        source = script.read_text()
        loop = source[source.index("def main(") :].splitlines()[-1].strip()
        assert loop in words(f"scripts/{script.stem}.html")
    for path in (ROOT / "docs" / "learning").glob("*.json"):
        made = json.loads(path.read_text())
        page = f"runs/{made['name']}.html"
        assert made["command"] in words(page).replace(" \\\n   ", "")
        assert f"{made['name']}.png" in (out / page).read_text()
        for sample in made.get("samples", ()):
            assert all(f"{name:<10}" in words(page) for name in sample)
    reference = "".join(page.read_text() for page in (out / "api").glob("*.html"))
    assert [name for name in spmdflow.__all__ if f'id="spmdflow.{name}"' not in reference] == []
    index = (out / "searchindex.js").read_text()
    assert "kv_cach" in index and "settings" in index  # stems, as the search looks them up
    for page in out.rglob("*.html"):  # nothing is loaded from a network
        assert not re.search(r'<(script|link|img)[^>]+(src|href)="https?:', page.read_text()), page
