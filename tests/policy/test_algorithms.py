"""Scripts of algos/ read as a diff against ppo.py: same blocks and names, every call in main."""

from __future__ import annotations

import ast
import difflib
import re

import pytest

from tests.policy.house import REPOSITORY, files, functions_of, tree_of

MOST_CHANGED_LINES = {
    "algos/grpo.py": 5,
    "algos/rloo.py": 5,
    "algos/reinforce_pp.py": 5,
    "algos/remax.py": 12,
    "algos/dapo.py": 21,
    "algos/distill.py": 11,
    "algos/safe_rlhf.py": 14,
    "algos/sft.py": 20,
    "algos/reward_model.py": 20,
    "algos/dpo.py": 19,
}
"""Script -> lines of main that differ from ppo.py's, counted as a diff counts them (- and +)."""

SCRIPTS = [file for file in files("algos") if file.count("/") == 1]
VERBS = ("generate_", "compute_", "update_")


def main_of(file: str) -> ast.FunctionDef:
    (main,) = [node for node in functions_of(tree_of(file)) if node.name == "main"]
    assert isinstance(main, ast.FunctionDef)
    return main


def lines_of(file: str) -> list[str]:
    """Lines of main below its docstring."""
    main = main_of(file)
    lines = (REPOSITORY / file).read_text(encoding="utf-8").splitlines()
    return lines[main.body[1].lineno - 1 : main.end_lineno]


def changed_lines(file: str) -> list[str]:
    """Lines of main that a diff against ppo.py shows."""
    return [
        line
        for line in difflib.unified_diff(lines_of("algos/ppo.py"), lines_of(file), n=0, lineterm="")
        if line[:1] in "+-" and line[:3] not in ("+++", "---")
    ]


def loop_lines(file: str) -> int:
    loops = [node for node in main_of(file).body if isinstance(node, ast.For)]
    return sum(loop.end_lineno - loop.lineno + 1 for loop in loops if loop.end_lineno)


@pytest.mark.parametrize("file", MOST_CHANGED_LINES)
def test_script_reads_as_a_diff_against_ppo(file: str) -> None:
    changed = changed_lines(file)

    assert 0 < len(changed) <= MOST_CHANGED_LINES[file], "\n".join(changed)


def test_readme_states_the_lines_of_every_script() -> None:
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*) \| (\d+) \| (\d+) \|", readme, flags=re.MULTILINE)
    stated = {
        f"algos/{script}.py": (int(loop), int(diff))
        for names, loop, diff in rows
        for script in re.findall(r"`(\w+)`", names)
    }

    assert stated == {file: (loop_lines(file), len(changed_lines(file))) for file in SCRIPTS}


@pytest.mark.parametrize("file", SCRIPTS)
def test_every_worker_call_stands_in_main(file: str) -> None:
    main = main_of(file)
    calls = [
        node
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr.startswith(VERBS)
    ]
    inside = {id(node) for node in ast.walk(main)}

    assert calls and all(id(call) in inside for call in calls)


@pytest.mark.parametrize("file", SCRIPTS)
def test_docstring_has_a_citation_numbered_departures_and_one_command(file: str) -> None:
    text = ast.get_docstring(tree_of(file)) or ""

    assert f"-m spmdflow.run {file}" in text
    assert "\n1. " in text and "20" in text.split("\n\n")[0] + text.split("\n\n")[1]
