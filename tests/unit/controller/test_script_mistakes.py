"""Wrong lines of a script are refused where they stand, before anything is sent."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spmdflow.controller.batch import Batch
from spmdflow.controller.group import WorkerGroup
from spmdflow.controller.step import Step
from spmdflow.errors import ColumnError, ProtocolError
from spmdflow.run import main
from spmdflow.worker_api.metric import Mean
from tests.algos.runs import ROOT, finish, log_of, torchrun
from tests.unit.toy_flow import Rank, share

CALLS: dict[str, tuple[Callable[[WorkerGroup, Batch], Any], str]] = {
    "texts": (
        lambda toy, batch: toy.make(["1+1="]),
        "toy.make: got a list of 1, expected a Batch with the columns ['prompts']; take rows from "
        "flow.prompts, or from the call that made them",
    ),
    "by position": (
        lambda toy, batch: toy.add(batch, 2.0),
        "toy.add: got 2 arguments by position, expected the batch alone; write add(batch, "
        "what=2.0)",
    ),
    "no number": (
        lambda toy, batch: toy.add(batch, what="two"),
        "toy.add: got what='two' (str), expected a float; correct the value",
    ),
    "map": (
        lambda toy, batch: batch.map(share, scale="two"),
        "map.share: got scale='two' (str), expected a float; correct the value",
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_wrong_call_is_refused_before_anything_is_sent(
    rank: Rank, toy: WorkerGroup, batch: Batch, case: str
) -> None:
    call, said = CALLS[case]
    sent = len(rank.flow.caller.records)

    with pytest.raises(ProtocolError) as caught:
        call(toy, batch)

    assert str(caught.value) == said
    assert len(rank.flow.caller.records) == sent


def test_batch_may_be_given_by_name(toy: WorkerGroup, batch: Batch) -> None:
    assert toy.add(batch=batch).ids.tolist() == batch.ids.tolist()


LOGGED: dict[str, tuple[Callable[[Step, Batch], Any], str]] = {
    "text": (lambda step, batch: step.log("text"), r"got 'text' \(str\), expected results of"),
    "batch": (lambda step, batch: step.log(batch), r"got Batch\(.*\(Batch\).*logged already"),
    "list": (lambda step, batch: step.log(x=[1, 2]), r"got x=\[1, 2\] \(list\), expected a numb"),
    "none": (lambda step, batch: step.log(x=None), r"got x=None \(NoneType\), expected a number"),
    "mapping": (lambda step, batch: step.log({"a/b": "c"}), r"got a/b='c' \(str\), expected a n"),
}


@pytest.mark.parametrize("case", LOGGED)
def test_what_is_no_metric_is_refused_where_it_is_logged(batch: Batch, case: str) -> None:
    log, said = LOGGED[case]

    with pytest.raises(ProtocolError, match=f"^step.log: {said}"):
        log(Step(1), batch)


def test_metrics_and_numbers_of_any_kind_are_logged() -> None:
    step = Step(1)

    step.log({"a": Mean(1.0, 2.0)}, b=True, c=3)

    assert step.merge_logged() == {"a": 0.5, "b": 1.0, "c": 3.0}


def test_nan_is_logged_with_a_warning_that_names_the_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        Step(1).log(x=float("nan"))

    assert re.search(r"got x=nan at \S+test_script_mistakes.py:\d+: Step", caplog.text)


def test_plain_answer_that_is_logged_as_metrics_names_the_line(toy: WorkerGroup) -> None:
    step = Step(1)
    step.log(toy.describe())

    told = (
        r"^step.log at \S+test_script_mistakes.py:\d+: step.log\(.*: toy.describe: returned int, "
    )
    with pytest.raises(ProtocolError, match=told):
        step.merge_logged()


@pytest.mark.parametrize("every", ["5", 2.0, True, -1])
def test_number_of_steps_that_is_none_is_refused(rank: Rank, toy: WorkerGroup, every: Any) -> None:
    with pytest.raises(ProtocolError, match=r"^flow.evaluate: got every=.*cfg.eval_every"):
        rank.flow.evaluate(toy, every=every)
    with pytest.raises(ProtocolError, match=r"^flow.save: got every=.*cfg.save_every"):
        rank.flow.save(every=every)


def test_mean_of_text_is_refused_by_name(batch: Batch) -> None:
    with pytest.raises(ColumnError, match=r"^mean\('prompt_text'\): got a column of text"):
        batch.mean("prompt_text")


def test_error_of_a_script_in_one_process_shows_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "own.py"
    script.write_text(FAILING.replace("batch.map(divide)", "actor.generate_sequences(['1+1='])"))
    words = [str(ROOT / "algos" / "grpo.yaml"), "data.prompts_per_step=8", "eval_every=0"]
    words += ["actor.update.mini_batch_size=8", f"run.dir={tmp_path / 'run'}"]

    status = main(["--inproc", str(script), *words])

    said = capsys.readouterr().err
    assert status == 1
    assert "ProtocolError: actor.generate_sequences: got a list of 1, expected a Batch" in said
    assert f'File "{script}", line {MAPPED_LINE}, in main' in said


FAILING = """\
import torch
from tensordict import TensorDict
from spmdflow import ActorWorker, GRPOConfig, map_function


@map_function(reads=("responses",), writes=("x",))
def divide(batch, *, reduce, report):
    return TensorDict({"x": torch.ones(1 // 0)}, batch_size=batch.batch_size)


def main(flow, cfg: GRPOConfig):
    actor = flow.spawn(ActorWorker, cfg.actor)
    prompts = flow.prompts(cfg.data)
    for step in flow.steps(cfg.total_steps):
        batch = actor.generate_sequences(next(prompts))
        made = batch.map(divide)
        step.log(x=made.mean("x"))
"""
MAPPED_LINE = FAILING[: FAILING.index("made =")].count("\n") + 1


@pytest.mark.slow
def test_map_function_that_raises_on_a_rank_names_the_line_that_called_it(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(FAILING)
    config = ROOT / "algos" / "grpo.yaml"
    words = ["data.prompts_per_step=8", "actor.update.mini_batch_size=8", "eval_every=0"]
    run_dir = tmp_path / "run"

    status = finish(
        torchrun(run_dir, str(config), *words, num_ranks=2, script=script, small=()), seconds=200
    )

    failure = json.loads((run_dir / "failure.json").read_text())
    assert status != 0
    assert failure["line"].endswith(f"own.py:{MAPPED_LINE}: made = batch.map(divide)")
    assert "map.divide" in log_of(run_dir).read_text()
    assert f"own.py:{MAPPED_LINE}: made = batch.map(divide)" in log_of(run_dir).read_text()
