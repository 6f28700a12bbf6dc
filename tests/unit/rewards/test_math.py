"""MATH-style answers, with the library that reads LaTeX."""

from __future__ import annotations

import gc
import importlib.util
import signal
import sys
import time

import pytest
from hypothesis import given, settings

from spmdflow.config.check import check
from spmdflow.config.load import load
from spmdflow.config.reward import check_rewards
from spmdflow.config.schema import RewardConfig
from spmdflow.errors import ConfigError
from spmdflow.requirement import install_command
from spmdflow.rewards import math
from spmdflow.rewards.math import answer_of, score
from tests.unit.config_folder import write_config_folder
from tests.unit.rewards.test_answers import GARBAGE, data

needs_library = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed"
)


@needs_library
@pytest.mark.parametrize(
    ("reference", "response", "right"),
    [
        (r"\frac{1}{2}", r"so \boxed{0.5}.", 1),
        (r"\frac{1}{2}", r"so \boxed{\dfrac12}", 1),
        (r"\frac{1}{2}", r"so \boxed{0.51}", 0),
        (r"We get \boxed{\frac{3}{4}}.", r"#### 0.75", 1),
        (r"2\sqrt{3}", r"\boxed{\sqrt{12}}", 1),
        (r"(3,4)", r"\boxed{(3, 4)}", 1),
        (r"(3,4)", r"\boxed{(4, 3)}", 0),
        (r"\{1,2\}", r"\boxed{\{2, 1\}}", 1),
        (r"[0,1)", r"\boxed{[0,1]}", 0),
        (r"\text{east}", r"\boxed{\text{east}}", 1),
        (r"\pi/2", r"\boxed{\frac{\pi}{2}}", 1),
        ("72", "The answer is $72$", 1),
        ("72", "<think>71</think><answer>72</answer>", 1),
        ("72", "I think 71", 0),
        ("1,000", r"\boxed{1000}", 1),
        ("-3", r"\boxed{3}", 0),
        (r"x=5", r"\boxed{5}", 1),
        ("5", r"so \boxed 5.", 1),
        ("-5", r"$\boxed -5$", 1),
        ("5", r"so \boxed 6, not 5", 0),
        (r"\frac{1}{2}", r"\fbox{0.5}", 1),
        ("4000", r"\boxed{4e3}", 1),
        ("0.015", "#### 1.5e-2", 1),
        ("4000", r"\boxed{4e4}", 0),
        ("5", r"\boxed{5 or 6}", 0),
    ],
)
def test_answers_are_equal_by_their_meaning(reference: str, response: str, right: int) -> None:
    found = score("", response, {"answer": reference}, seconds=60)

    assert found.pop("answer")
    assert found == {"score": right, "accuracy": right, "answered": 1}


def test_answer_is_the_last_box_or_stands_behind_the_mark() -> None:
    assert answer_of(r"\boxed{1} \boxed{\frac{a}{b}} #### 3") == r"$\boxed{\frac{a}{b}}$"
    assert answer_of("so\n#### 3 \nbye") == r"$\boxed{3}$"
    assert answer_of(r"\boxed{" + "1" * 1001 + "}") is None
    assert score("", "it is 5", {"answer": "5"}, strict=True)["answered"] == 0
    votes = [r"\boxed{\dfrac 12}", r"#### \frac12", r"so $\boxed{\frac{1}2}$"]
    answers = [score("", vote, {"answer": "1/2"})["answer"] for vote in votes]
    assert answers[0] == answers[1] == r"\boxed{\frac12}" != answers[2]


@needs_library
@pytest.mark.parametrize(
    "answer", ["9^{9^{9^{9}}}", r"\sum_{i=1}^{10^{9}} i^{50}", "1000000!", "(" * 900]
)
def test_answer_that_takes_long_to_compare_is_not_equal_within_the_limit(answer: str) -> None:
    start = time.monotonic()

    found = score("", rf"\boxed{{{answer}}}", {"answer": "9"}, seconds=1)

    assert found["score"] == 0
    # the limit of 1 s and the library's import on a busy machine; without one: for ever
    assert time.monotonic() - start < 100


def test_limit_that_passes_inside_of_a_callback_of_the_collector_still_ends_the_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # pytest's own hook formats a traceback, in which the repeated signal would be an error of it
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    begun = time.process_time()

    def collecting(phase: str, info: object) -> None:
        while time.process_time() < begun + 0.5:
            pass

    def work() -> bool:
        gc.collect()
        while time.process_time() < begun + 60:
            pass
        return True

    gc.callbacks.append(collecting)
    try:
        assert not math._run_with_limit(0.2, work)
    finally:
        gc.callbacks.remove(collecting)

    assert time.process_time() < begun + 30
    assert signal.getsignal(signal.SIGPROF) == signal.SIG_DFL
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


@needs_library
def test_reading_that_once_took_too_long_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    import math_verify

    def parse(*_: object, **__: object) -> list[object]:
        while True:
            pass

    row = {"answer": r"\frac{3}{97}"}
    response = r"\boxed{\frac{6}{194}}"
    with monkeypatch.context() as patch:
        patch.setattr(math_verify, "parse", parse)
        slow = score("", response, row, seconds=1)

    assert slow["score"] == 0
    assert score("", response, row, seconds=60)["score"] == 1


@needs_library
@settings(max_examples=40, deadline=None)
@given(GARBAGE)
def test_no_text_is_an_error(text: str) -> None:
    assert score("", text, {"answer": "5"}, seconds=1)["score"] in (0, 1)


@needs_library
def test_gsm8k_rows_verify_themselves_as_mathematics_too() -> None:
    for row in data("gsm8k/test.jsonl")[:300]:
        number = row["answer"].rpartition("####")[2].strip()
        assert score("", rf"\boxed{{{number}}}", row, seconds=60)["score"] == 1
        assert score("", rf"\boxed{{{number}1}}", row)["score"] == 0


def test_missing_library_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    reward = RewardConfig(function="spmdflow.rewards.math:score")
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "math_verify" else find(name)
    )

    with pytest.raises(ConfigError) as caught:
        check_rewards("reward", reward)

    assert str(caught.value) == (
        "reward.function: got spmdflow.rewards.math, but math_verify is not installed, expected "
        f"it; {install_command('math')}, or choose another function"
    )


@needs_library
def test_function_and_its_arguments_are_accepted(tmp_path, monkeypatch) -> None:
    write_config_folder(tmp_path)
    monkeypatch.chdir(tmp_path)

    cfg = load("ppo.py", None, ["reward.function=spmdflow.rewards.math:score(seconds=5)"]).cfg

    check(cfg, 4)
