"""docs/EPISODES.md: the table of programs is what the slow test runs."""

from __future__ import annotations

from pathlib import Path

from tests.programs.table import PROGRAMS
from tests.unit.pages.programs import PAGE, written_page

HERE = Path(__file__).parents[2] / "programs"


def test_table_of_programs_on_the_page_is_that_of_the_test() -> None:
    text = PAGE.read_text(encoding="utf-8")

    assert written_page(text) == text, ".venv/bin/python -m tests.unit.pages.programs"


def test_every_program_has_its_file_and_exact_pins() -> None:
    for program in PROGRAMS:
        pins = (HERE / "requirements" / f"{program.environment}.txt").read_text().split()

        assert "score=" in program.episode or (HERE / "clients" / f"{program.name}.py").is_file()
        assert pins and all("==" in line for line in pins)
