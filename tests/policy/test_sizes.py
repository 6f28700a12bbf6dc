"""Files of at most 400 lines, functions of at most 60, short scripts, short pages."""

from __future__ import annotations

import ast

import pytest

from spmdflow.config.leaf import defaults, leaves
from spmdflow.config.schema import PPOConfig
from tests.policy.house import REPOSITORY, files, functions_of, text_of, tree_of

FILE_LINES, FUNCTION_LINES = 400, 60
LONG_FILES: dict[str, str] = {}
"""File -> why it may be longer."""
LONG_FUNCTIONS: dict[str, str] = {}
"""file:function -> why it may be longer."""
PYTHON = files("spmdflow", "algos", "scripts", "tests")


def _lines_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def test_files_are_short() -> None:
    sizes = {file: text_of(file).count("\n") for file in PYTHON}
    long = {file: size for file, size in sizes.items() if size > FILE_LINES}

    assert {file: size for file, size in long.items() if file not in LONG_FILES} == {}
    assert set(LONG_FILES) - set(long) == set(), "short again: take it out of the table"


def test_functions_are_short() -> None:
    long = {
        f"{file}:{node.name}": _lines_of(node)
        for file in PYTHON
        for node in functions_of(tree_of(file))
        if _lines_of(node) > FUNCTION_LINES
    }

    assert {name: size for name, size in long.items() if name not in LONG_FUNCTIONS} == {}
    assert set(LONG_FUNCTIONS) - set(long) == set(), "short again: take it out of the table"


@pytest.mark.parametrize("file", [file for file in files("algos") if file.count("/") == 1])
def test_algorithm_script_has_a_main_of_10_to_60_lines(file: str) -> None:
    main = {node.name: node for node in functions_of(tree_of(file))}["main"]

    assert [argument.arg for argument in main.args.args] == ["flow", "cfg"]
    assert 10 <= _lines_of(main) <= 60


def test_ppo_has_at_most_115_settings_and_each_has_a_sentence() -> None:
    settings = list(leaves(defaults(PPOConfig)))

    assert 50 < len(settings) < 116
    assert [leaf.key for leaf in settings if not leaf.doc.endswith(".")] == []


def test_readme_is_short() -> None:
    assert text_of("README.md").count("\n") <= 110


@pytest.mark.parametrize("name", ["local.sh", "multinode.sh", "slurm.sbatch", "kubernetes.yaml"])
def test_launch_file_is_short_and_ends_with_torchrun(name: str) -> None:
    lines = (REPOSITORY / "launch" / name).read_text(encoding="utf-8").splitlines()

    assert len(lines) <= 60
    assert lines[-1].strip().startswith("torchrun ")
    assert lines[-1].endswith('-m spmdflow.run "$@"')
