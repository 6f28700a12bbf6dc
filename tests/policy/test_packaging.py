"""Every room is a package, and a wheel would hold every module and data file of the tree."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from scripts.wheel_contents import (
    FOLDERS,
    check_wheel,
    differences,
    files_of_tree,
    rooms_without_init,
)
from tests.policy.house import REPOSITORY

LIST_FILES = """
import json, os
from distutils.core import run_setup
build = run_setup("setup.py", stop_after="config").get_command_obj("build_py")
build.ensure_finalized()
folder_of = {package: package.replace(".", "/") for package in build.packages}
found = [f"{folder_of[package]}/{os.path.basename(file)}"
         for package, _, file in build.find_all_modules()]
found += [f"{folder_of[package]}/{name}"
          for package, _, _, names in build.data_files for name in names]
print(json.dumps(found))
"""
"""What setuptools would put into a wheel, by its own rules, without building one."""


def packed_files(tree: Path) -> set[str]:
    program = [sys.executable, "-W", "ignore", "-c", "import setuptools\n" + LIST_FILES]
    done = subprocess.run(program, cwd=tree, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def copy_of_tree(folder: Path) -> Path:
    for name in FOLDERS:
        shutil.copytree(REPOSITORY / name, folder / name)
    for name in ("setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, folder)
    return folder


def committed_links(tree: Path) -> list[str]:
    """Names of the links in git's index of a tree, e.g. a link to the models of one machine."""
    done = subprocess.run(
        ["git", "ls-files", "--stage"], cwd=tree, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    link_mode = "120000"
    return [
        line.partition("\t")[2] for line in done.stdout.splitlines() if line.startswith(link_mode)
    ]


@pytest.mark.skipif(not (REPOSITORY / ".git").exists(), reason="needs git's index of the tree")
def test_no_link_is_committed() -> None:
    assert committed_links(REPOSITORY) == []


def test_a_committed_link_is_named(tmp_path: Path) -> None:
    (tmp_path / "models").symlink_to("/another/place")
    for words in (["init", "-q"], ["add", "models"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True, timeout=60)

    assert committed_links(tmp_path) == ["models"]


def test_every_room_is_a_package() -> None:
    assert rooms_without_init(REPOSITORY) == []


def test_a_wheel_holds_every_module_and_data_file() -> None:
    assert differences(packed_files(REPOSITORY), REPOSITORY) == []


def test_a_room_without_init_is_named(tmp_path: Path) -> None:
    tree = copy_of_tree(tmp_path)
    (tree / "spmdflow" / "controller" / "__init__.py").unlink()

    assert rooms_without_init(tree) == ["spmdflow/controller"]


def test_a_file_that_packaging_leaves_out_is_named(tmp_path: Path) -> None:
    tree = copy_of_tree(tmp_path)
    setup = (tree / "setup.py").read_text()
    (tree / "setup.py").write_text(
        setup.replace('include=["spmdflow*"]', 'include=["spmdflow*"], exclude=["*.data"]')
    )
    (tree / "algos" / "tasks.csv").write_text("1,2\n")

    lacking = differences(packed_files(tree), tree)

    assert "the wheel lacks spmdflow/data/ragged.py" in lacking
    assert "the wheel lacks spmdflow/algos/tasks.csv" in lacking


def test_a_wheel_without_a_module_or_with_links_into_the_repository_is_named(
    tmp_path: Path,
) -> None:
    wheel = tmp_path / "a.whl"
    lost = "spmdflow/controller/flow.py"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in files_of_tree(REPOSITORY) - {lost} | {"spmdflow/stale.py"}:
            archive.writestr(name, "")
        archive.writestr("a.dist-info/METADATA", "see [this](docs/PLAN.md), [that](https://x.org)")

    assert check_wheel(wheel, REPOSITORY) == [
        "the description has a relative link: (docs/PLAN.md)",
        f"the wheel lacks {lost}",
        "the tree lacks spmdflow/stale.py",
    ]
