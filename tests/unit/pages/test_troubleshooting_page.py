"""docs/TROUBLESHOOTING.md names settings, commands and files that there are."""

from __future__ import annotations

import re
from pathlib import Path

from spmdflow.config.leaf import defaults, leaves
from spmdflow.config.schema import PPOConfig
from spmdflow.plan.__main__ import main as plan

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "TROUBLESHOOTING.md").read_text()
KEYS = {leaf.key for leaf in leaves(defaults(PPOConfig))}
GROUPS = ("actor", "critic", "reference", "reward", "data", "run", "advantage")


def test_every_setting_on_the_page_is_one() -> None:
    named = set(re.findall(rf"`((?:{'|'.join(GROUPS)})\.[a-z_.]+)", TEXT))

    assert len(named) > 20
    calls = {"critic.write"}
    assert sorted(named - KEYS - calls - {"critic.optimizer", "run.name"}) == []


def test_values_on_the_page_can_be_set() -> None:
    words = re.findall(r"`([a-z_]+(?:\.[a-z_]+)*=[^`]+)`", TEXT)
    settings = [word for word in words if word.partition("=")[0] in KEYS and "RUN_DIR" not in word]

    assert len(settings) > 8
    for word in settings:
        assert plan([str(ROOT / "algos" / "ppo.py"), word, "--world=2", "--no-data"]) in (0, 1), (
            word
        )


def test_other_pages_that_it_names_are_there() -> None:
    assert [
        name for name in re.findall(r"`([A-Z]+\.md)`", TEXT) if not (ROOT / "docs" / name).exists()
    ] == []
