"""Rows between pools: values, bytes and row ids, checked by toy models on four gloo ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.programs import dataflow
from tests.distributed.ranks import watch_ranks
from tests.distributed.replayed import planned_as_counted

CASES = ("colocate", "standalone", "uneven", "reversed", "subset")
MODEL = Path(__file__).parents[2] / "algos" / "arithmetic"


@pytest.fixture(scope="module")
def runs(tmp_path_factory, spawn_ranks):
    out = tmp_path_factory.mktemp("dataflow")
    files = (str(MODEL / "train.jsonl"), str(MODEL / "model"))
    spawn_ranks(dataflow.run_all, 4, str(out), *files)
    return out


def steps_of(runs, case):
    return [json.loads(line) for line in (runs / case / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("case", CASES)
def test_every_row_arrives_with_its_values_under_every_placement(runs, case):
    """The program itself asserts every value; here: that it got to the end."""
    assert json.loads((runs / f"{case}.json").read_text())["status"] == 0
    assert [step["step"] for step in steps_of(runs, case)] == [1, 2, 3]


@pytest.mark.parametrize("case", CASES)
def test_bytes_moved_equal_bytes_planned_and_what_torch_sent(runs, case):
    steps = steps_of(runs, case)
    summary = json.loads((runs / f"{case}.json").read_text())

    moved = sum(step["transfer/bytes"] for step in steps)
    headers = sum(step["transfer/header_bytes"] for step in steps)

    assert moved == sum(step["transfer/planned_bytes"] for step in steps)
    assert moved + headers == summary["sent"]
    assert moved > 0


@pytest.mark.parametrize("case", CASES)
def test_plan_has_the_bytes_that_were_counted_on_every_edge(runs, case):
    placement = dataflow.cases(4)[case][0]
    files = (str(MODEL / "train.jsonl"), str(MODEL / "model"))
    cfg = dataflow.config_of(case, placement, runs, *files)

    assert planned_as_counted(dataflow, cfg, runs / case).edges


@pytest.mark.parametrize("case", CASES)
def test_every_sample_is_used_once_in_each_epoch_of_an_update(runs, case):
    for step in steps_of(runs, case):
        assert step["toy/used"] == 2 * 11
        assert step["toy/steps"] == 2 * 3


def test_only_what_the_script_fetches_passes_the_controller(runs):
    for step in steps_of(runs, "colocate"):
        assert step["controller/tensor_bytes"] > 0
        assert step["controller/fetched_bytes"] == 0


@pytest.mark.parametrize(
    "placement", [pytest.param("colocate", marks=pytest.mark.drill), "standalone"]
)
def test_method_that_writes_into_its_rows_ends_the_run_under_every_placement(tmp_path, placement):
    files = (str(MODEL / "train.jsonl"), str(MODEL / "model"))

    watch_ranks(dataflow.run_in_place, 2, placement, str(tmp_path), *files)

    failure = json.loads((tmp_path / placement / "failure.json").read_text())
    assert "second.write: wrote into column 'number' in place" in json.dumps(failure)
