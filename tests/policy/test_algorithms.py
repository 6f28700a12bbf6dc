"""Scripts of algos/ read as a diff against ppo.py: same blocks and names, every call in main."""

from __future__ import annotations

import ast
import difflib
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.policy.house import REPOSITORY, files, functions_of, tree_of

MOST_CHANGED_LINES = {
    "algos/grpo.py": 5,
    "algos/rloo.py": 5,
    "algos/reinforce_pp.py": 5,
    "algos/remax.py": 12,
    "algos/dapo.py": 21,
    "algos/distill.py": 11,
    "algos/safe_rlhf.py": 14,
    "algos/sft.py": 21,
    "algos/reward_model.py": 21,
    "algos/dpo.py": 20,
}
"""Script -> lines of main that differ from ppo.py's, counted as a diff counts them (- and +)."""

SCRIPTS = [file for file in files("algos") if file.count("/") == 1]
YAML_FILES = sorted(path.stem for path in (REPOSITORY / "algos").glob("*.yaml"))
RL_SCRIPTS = [
    file
    for file in SCRIPTS
    if "advantages" in (REPOSITORY / file).read_text(encoding="utf-8").split("def main")[1]
]
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


def owner_of(yaml: str) -> str:
    """The script that a YAML file belongs to: the longest name that its own begins with."""
    stems = [Path(file).stem for file in SCRIPTS]
    return max((stem for stem in stems if f"{yaml}_".startswith(f"{stem}_")), key=len)


def kl_place_of(yaml: str) -> str:
    """Where the settings of a YAML file have the KL to the reference."""
    settings = OmegaConf.load(REPOSITORY / "algos" / f"{yaml}.yaml")
    in_loss = OmegaConf.select(settings, "actor.loss.kl_coef", default=0.0)
    in_reward = OmegaConf.select(settings, "advantage.kl_coef", default=0.0)
    assert not (in_loss and in_reward), f"{yaml}.yaml has the KL twice"
    if in_loss:
        return "in the loss"
    return "in the reward" if in_reward else "none"


@pytest.mark.parametrize("file", RL_SCRIPTS)
def test_docstring_says_where_each_yaml_file_of_the_script_has_the_kl(file: str) -> None:
    text = (ast.get_docstring(tree_of(file)) or "") + "\n"
    sentence = re.search(r"^KL to the reference: (.*?\))\.\n", text, re.MULTILINE | re.DOTALL)
    yaml_files = [yaml for yaml in YAML_FILES if owner_of(yaml) == Path(file).stem]

    stated = {
        name: place
        for place, names in re.findall(
            r"(in the loss|in the reward|none) \(([^)]*)\)", sentence[1] if sentence else ""
        )
        for name in re.findall(r"(\w+)\.yaml", names)
    }

    assert stated == {yaml: kl_place_of(yaml) for yaml in yaml_files}
