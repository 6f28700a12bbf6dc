"""Reward functions: finding them, reading their answers, the bundled ones. No processes."""

from __future__ import annotations

import math
import statistics
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmdflow.errors import ConfigError
from spmdflow.rewards.arithmetic import exact_match, shuffled
from spmdflow.rewards.child import InvalidScore, load_function, scores_of
from spmdflow.rewards.pool import CallQueue
from spmdflow.rewards.sentiment import lexicon_score, load_lexicon

FORM = '"path/file.py:name" or "module:name"'


@pytest.mark.parametrize(
    ("value", "scores"),
    [
        (1, {"score": 1.0}),
        (True, {"score": 1.0}),
        (np.float32(0.5), {"score": 0.5}),
        (Fraction(1, 4), {"score": 0.25}),
        ({"score": 2, "length": np.int64(3)}, {"score": 2.0, "length": 3.0}),
        ({"score": 0.0, "verdict": "wrong", "why": None, 7: 8}, {"score": 0.0}),
        ({"score": 1, "answer": "1/2"}, {"score": 1.0, "answer": "1/2"}),
        ({"score": 1, "answer": Fraction(1, 2)}, {"score": 1.0, "answer": "1/2"}),
        ({"score": 0, "answer": None}, {"score": 0.0, "answer": None}),
    ],
)
def test_numbers_and_dicts_with_a_score_are_kept(value, scores):
    assert scores_of(value) == scores


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "returned None (NoneType)"),
        ("0.5", "returned '0.5' (str)"),
        ("x" * 99, "returned '" + "x" * 56 + "... (str)"),
        (np.zeros((2, 1)), "returned array([[0.], [0.]]) (ndarray)"),
        (math.nan, "returned nan"),
        (-math.inf, "returned -inf"),
        (10**400, "returned a number beyond float"),
        ({}, 'returned a dict without "score" (it has no keys)'),
        ({"reward": 1}, "returned a dict without \"score\" (it has 'reward')"),
        ({"score": None}, "returned score=None (NoneType)"),
        ({"score": math.nan}, "returned score=nan"),
        ({"score": 1, "length": math.inf}, "returned length=inf"),
    ],
)
def test_answers_without_a_finite_score_are_refused(value, message):
    with pytest.raises(InvalidScore) as caught:
        scores_of(value)

    assert str(caught.value) == message


def test_function_is_found_in_a_file_and_in_a_module(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("class Judge:\n    @staticmethod\n    def score(p, r, row): return len(r)\n")

    assert load_function(f"{path}:Judge.score")("", "abc", {}) == 3
    assert load_function("spmdflow.rewards.arithmetic:exact_match") is exact_match


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "score",
            f"reward.function: got 'score', expected {FORM}; "
            f"name the file or module and, after a colon, the function",
        ),
        (
            "gone.py:score",
            f"reward.function: got 'gone.py:score', but there is no file gone.py in @, "
            f"expected {FORM}; correct the path",
        ),
        (
            "no_such_module_here:score",
            f"reward.function: got 'no_such_module_here:score', but there is no module "
            f"'no_such_module_here', expected {FORM}; correct the name, or name the file instead",
        ),
        (
            "mine.py:scored",
            "reward.function: got 'mine.py:scored', but 'scored' is nothing of that name, "
            "expected a function; choose one of the module's: later, score, short",
        ),
        (
            "mine.py:LIMIT",
            "reward.function: got 'mine.py:LIMIT', but 'LIMIT' is int, "
            "expected a function; choose one of the module's: later, score, short",
        ),
        (
            "mine.py:short",
            "reward.function: got 'mine.py:short' with the parameters (prompt, response), "
            "expected fn(prompt, response, row) -> float | dict; "
            "give it these three (too many positional arguments)",
        ),
    ],
)
def test_function_that_cannot_be_used_is_refused(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "from math import sqrt\n"
        "LIMIT = 3\n"
        "def score(prompt, response, row): return 0.0\n"
        "def short(prompt, response): return 0.0\n"
        "async def later(prompt, response, row): return 0.0\n"
    )

    with pytest.raises(ConfigError) as caught:
        load_function(name)

    assert str(caught.value) == message.replace("@", str(tmp_path))


def test_module_that_lacks_something_of_its_own_is_not_called_missing(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "needs_more.py").write_text("import something_not_installed\n")

    with pytest.raises(ModuleNotFoundError, match="something_not_installed"):
        load_function("needs_more:score")


@pytest.mark.parametrize(
    ("response", "score", "accuracy"),
    [
        (" 134 ", 1.0, 1.0),
        ("124", 1 / 3, 0.0),
        ("13", 1 / 3, 0.0),
        ("1340", 3 / 8, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_exact_match_gives_credit_for_each_right_digit(response, score, accuracy):
    assert exact_match("89+45=", response, {"answer": "134"}) == {
        "score": pytest.approx(score),
        "accuracy": accuracy,
    }


@given(st.text(), st.text(), st.text())
def test_both_scores_stay_between_0_and_1_and_agree_on_accuracy(prompt, response, answer):
    true, control = (fn(prompt, response, {"answer": answer}) for fn in (exact_match, shuffled))

    assert 0 <= true["score"] <= 1
    assert 0 <= control["score"] < 1
    assert true["accuracy"] == control["accuracy"]


def test_control_is_the_same_each_time_and_worth_the_same_for_every_response():
    problems = [(f"{a}+{b}=", str(a + b)) for a in range(10, 90) for b in range(10, 50)]

    def mean(response_of) -> float:
        return statistics.fmean(
            shuffled(prompt, response_of(answer), {"answer": answer})["score"]
            for prompt, answer in problems
        )

    assert shuffled("1+1=", "2", {"answer": "2"}) == shuffled("1+1=", " 2 ", {"answer": "2"})
    # 3200 draws, standard error 0.005: within four of them
    for response_of in (str, lambda answer: "1", lambda answer: "100", lambda answer: answer[::-1]):
        assert mean(response_of) == pytest.approx(0.5, abs=0.02)


def test_lexicon_score_is_signed_bounded_and_turned_by_negations(tmp_path):
    path = tmp_path / "lexicon.txt"
    path.write_text("happy\t2.7\t0.9\t[3, 2]\nsad\t-2.1\t0.9\t[-2]\n\n")
    lexicon = load_lexicon(path)

    def score(text: str) -> float:
        return lexicon_score(text, lexicon)

    assert lexicon == {"happy": 2.7, "sad": -2.1}
    assert score("A dog.") == 0
    assert score("The dog was happy.") == pytest.approx(2.7 / math.sqrt(2.7**2 + 15))
    assert (
        score("sad")
        < score("a dog")
        < score("happy")
        < score("Very happy")
        < score("Happy! ! very happy")
    )
    assert score("He isn't happy") < 0 < score("never so sad")
    assert -1 <= score("sad " * 1000) < -0.99 < 0.99 < score("happy " * 1000) <= 1


@given(st.integers(0, 300), st.integers(1, 8))
def test_chunks_cover_every_sample_once_in_order_and_end_small(num_samples, num_workers):
    work = CallQueue(range(num_samples), num_workers, strict=False)

    chunks = []
    while chunk := work.next_chunk():
        chunks.append(chunk)

    assert [number for chunk in chunks for number in chunk] == list(range(num_samples))
    assert all(len(chunk) <= 64 for chunk in chunks)
    assert not chunks or len(chunks[-1]) == 1


def test_failed_sample_in_strict_mode_waits_for_earlier_samples_only():
    work = CallQueue(range(10), 1, strict=True)
    assert work.next_chunk() == [0, 1, 2, 3, 4]
    work.scores[0] = {"score": 1.0}

    work.fail(2, "raised")
    work.requeue([1, 3, 4])

    assert not work.finished
    assert work.next_chunk() == [1]
    assert work.next_chunk() == []
    work.scores[1] = {"score": 1.0}
    assert work.finished


def test_failed_sample_otherwise_lets_all_others_run():
    work = CallQueue(range(4), 1, strict=False)
    assert work.next_chunk() == [0, 1]

    work.fail(0, "raised")
    work.requeue([1])

    assert [work.next_chunk() for _ in range(3)] == [[1, 2], [3], []]
