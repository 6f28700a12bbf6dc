"""docs/pictures: every module and method that a picture names exists, and both themes are drawn."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import spmdflow
from spmdflow.parallel.layout import Layout
from spmdflow.worker_api.register import registered_methods
from spmdflow.worker_api.worker import Worker

ROOT = Path(__file__).parents[3]
PICTURES = sorted((ROOT / "docs" / "pictures").glob("*.svg"))


def _words(path: Path) -> str:
    return "\n".join(re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text("utf-8")))


def _methods() -> set[str]:
    public = [getattr(spmdflow, name) for name in spmdflow.__all__]
    workers = [thing for thing in public if isinstance(thing, type) and issubclass(thing, Worker)]
    return {method for worker in workers for method in registered_methods(worker)}


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_picture_is_on_a_page_and_names_what_exists(path: Path) -> None:
    words = _words(path)
    page = (ROOT / "docs" / "CONCEPTS.md").read_text("utf-8")
    modules = re.findall(r"\w+/\w+\.py", words)
    methods = re.findall(r"\b(?:compute|update|generate)_[a-z_]+\b(?<!_)", words)

    assert f"](pictures/{path.name})" in page
    assert "prefers-color-scheme: dark" in path.read_text("utf-8")
    assert modules or methods
    assert [name for name in modules if not (ROOT / "spmdflow" / name).is_file()] == []
    assert sorted(set(methods) - _methods()) == []


def test_micro_dp_groups_of_the_weight_picture_are_those_of_the_layout() -> None:
    layout = Layout((0, 1, 2, 3), tp_size=4, gen_tp_size=2)
    drawn = re.findall(r"micro-DP group (\d), (\d)", _words(ROOT / "docs/pictures/weight.svg"))

    assert [tuple(map(int, group)) for group in drawn] == layout.axis_groups("micro_dp")


def test_calls_of_the_step_picture_are_those_of_ppo() -> None:
    script = (ROOT / "algos" / "ppo.py").read_text("utf-8")
    called = re.findall(r"\.((?:compute|update|generate)_\w+)\(", script)

    drawn = re.findall(r"(?:compute|update|generate)_[a-z_]+\b(?<!_)", _words(PICTURES[1]))

    assert PICTURES[1].stem == "step"
    assert sorted(drawn) == sorted(called)
