"""The docstring of each package names its files, all of them and no others."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.policy.house import REPOSITORY

PACKAGES = sorted(str(path.parent) for path in (REPOSITORY / "spmdflow").rglob("__init__.py"))


def page_of(package: Path) -> str:
    """The docstring of a package."""
    return ast.get_docstring(ast.parse((package / "__init__.py").read_text("utf-8"))) or ""


def files_in_table(page: str) -> list[str]:
    """The names in the first column of tables that begin with `| file |`."""
    names = []
    for table in re.findall(
        r"^\| file \|[^\n]*\n\|[-|]+\|\n((?:\|[^\n]*\n?)+)", page, re.MULTILINE
    ):
        for line in table.splitlines():
            names += re.findall(r"\w+", line.split("|")[1])
    return names


@pytest.mark.parametrize("package", PACKAGES)
def test_docstring_of_a_package_names_every_file(package: str) -> None:
    page = page_of(Path(package))
    files = {path.stem for path in Path(package).glob("*.py")} - {"__init__", "__main__"}

    assert files - set(re.findall(r"\w+", page)) == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_docstring_of_a_package_names_no_file_that_is_not_there(package: str) -> None:
    entries = {path.stem for path in Path(package).iterdir()}

    assert set(files_in_table(page_of(Path(package)))) - entries == set()


def test_table_of_files_is_read() -> None:
    page = "Text.\n\n| file | what |\n|---|---|\n| `a`, b | x |\n| c | y, z |\n"

    assert files_in_table(page) == ["a", "b", "c"]


def test_page_for_maintainers_names_ten_files_to_read_and_no_file_that_is_not_there() -> None:
    page = (REPOSITORY / "docs" / "MAINTAINERS.md").read_text("utf-8")
    to_read = re.findall(r"^\d+\. \*\*`([\w/.]+)`\*\*", page, re.MULTILINE)
    missing = []
    for path in re.findall(r"`([\w/]+(?:\.py|/))`", page):
        if not (REPOSITORY / "spmdflow" / path).exists() and not (REPOSITORY / path).exists():
            missing.append(path)

    assert len(to_read) == 10
    assert missing == []
