"""Advice to install something names what PyPI has, as setup.cfg states it."""

from __future__ import annotations

from configparser import ConfigParser
from importlib import metadata
from pathlib import Path

import pytest

from spmdflow.requirement import install_command, requirements_of

ROOT = Path(__file__).parents[2]


def extras_of_setup() -> dict[str, list[str]]:
    parser = ConfigParser()
    parser.read(ROOT / "setup.cfg")
    extras = {}
    for name, text in parser["options.extras_require"].items():
        lines = [line for line in text.split("\n") if line and not line.startswith("#")]
        extras[name] = [line.partition(";")[0] for line in lines if ";" not in line]
    return extras


@pytest.mark.parametrize("extra", [*extras_of_setup()])
def test_requirements_are_those_of_setup(extra: str) -> None:
    found = requirements_of(extra)

    def sorted_parts(texts: list[str]) -> list[tuple[str, ...]]:
        return sorted(
            tuple(sorted(text.replace("<", ",<").replace(">", ",>").split(","))) for text in texts
        )

    plain = [text for text in found if not text.startswith("triton")]
    assert sorted_parts(plain) == sorted_parts(extras_of_setup()[extra])


def test_command_quotes_each_requirement() -> None:
    command = install_command("view")

    assert command == "pip install " + " ".join(f"'{each}'" for each in requirements_of("view"))
    assert "plotly" in command and "spmdflow" not in command


def test_without_an_installation_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", absent)

    assert "the extra vllm in setup.cfg" in install_command("vllm")


def test_no_page_and_no_message_says_to_install_an_extra_by_a_name_that_pypi_lacks() -> None:
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "spmdflow").rglob("*.py")]
    for path in files:
        if path.name not in ("STATUS.md", "CHANGELOG.md"):
            assert "spmdflow[" not in path.read_text(encoding="utf-8"), path
