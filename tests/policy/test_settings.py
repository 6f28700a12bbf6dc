"""Each setting has a sentence; each algorithm script has a short `main(flow, cfg)`."""

from __future__ import annotations

import ast

import pytest

from spmdflow.config.leaf import defaults, leaves
from spmdflow.config.schema import PPOConfig
from tests.policy.house import files, functions_of, tree_of


def _lines_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


@pytest.mark.parametrize("file", [file for file in files("algos") if file.count("/") == 1])
def test_algorithm_script_has_a_main_of_10_to_60_lines(file: str) -> None:
    main = {node.name: node for node in functions_of(tree_of(file))}["main"]

    assert [argument.arg for argument in main.args.args] == ["flow", "cfg"]
    assert 10 <= _lines_of(main) <= 60


def test_each_setting_of_ppo_has_a_sentence() -> None:
    settings = list(leaves(defaults(PPOConfig)))

    assert len(settings) > 50
    assert [leaf.key for leaf in settings if not leaf.doc.endswith(".")] == []
