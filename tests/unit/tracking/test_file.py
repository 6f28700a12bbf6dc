"""metrics.jsonl and samples.jsonl."""

from __future__ import annotations

import json
import logging
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdflow.errors import SpmdflowError
from spmdflow.tracking.progress import Sample
from spmdflow.tracking.tracker import Tracker, append_lines, cut_back, read_lines

RECORDS = st.lists(
    st.fixed_dictionaries(
        {"step": st.integers(0, 20), "x": st.floats(allow_nan=False, allow_infinity=False)}
    ),
    max_size=8,
).map(lambda records: sorted(records, key=lambda record: record["step"]))


def test_a_step_is_one_line_with_step_first_and_sorted_names(tmp_path):
    Tracker(tmp_path).write_metrics(3, {"b/z": 2, "a": 1.5})

    assert (tmp_path / "metrics.jsonl").read_text() == '{"step":3,"a":1.5,"b/z":2.0}\n'


def test_a_step_is_on_disk_before_the_next_one_begins(tmp_path):
    tracker = Tracker(tmp_path)
    for step in range(3):
        tracker.write_metrics(step, {"a": step})
        assert [record["step"] for record in read_lines(tracker.metrics_path)][-1] == step


def test_numbers_that_are_not_finite_become_null_with_a_warning(tmp_path, caplog):
    Tracker(tmp_path).write_metrics(1, {"a": math.nan, "b": math.inf, "c": 1.0})

    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line, parse_constant=pytest.fail) == {"step": 1, "a": None, "b": None, "c": 1}
    assert "step 1" in caplog.text and "'a': nan" in caplog.text and "'c'" not in caplog.text


def test_samples_are_one_line_each_and_keep_any_text(tmp_path):
    text = 'a "quoted"\nline \x00 \ud800 end'
    Tracker(tmp_path).write_samples(4, [Sample(text, "b", 1.0), Sample("c", "d", math.nan)])

    first, second = read_lines(tmp_path / "samples.jsonl")
    assert first == {"step": 4, "prompt": text, "response": "b", "score": 1.0}
    assert second["score"] is None


def test_cut_back_drops_later_steps_of_both_files(tmp_path):
    tracker = Tracker(tmp_path)
    for step in range(1, 6):
        tracker.write_metrics(step, {"a": step})
        tracker.write_samples(step, [Sample("p", "r", step)])
    tracker = Tracker(tmp_path, last_step=3)

    for path in (tracker.metrics_path, tracker.samples_path):
        assert [record["step"] for record in read_lines(path)] == [1, 2, 3]


def test_cut_back_without_files_is_fine_and_makes_none(tmp_path):
    Tracker(tmp_path, last_step=3)

    assert list(tmp_path.iterdir()) == []


def test_a_start_without_checkpoint_sets_the_old_files_aside(tmp_path, caplog):
    for _ in range(3):
        tracker = Tracker(tmp_path)
        tracker.write_metrics(0, {"a": 1})

    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["metrics.1.jsonl", "metrics.2.jsonl", "metrics.jsonl"]
    assert all(len(read_lines(tmp_path / name)) == 1 for name in names)
    assert "metrics.2.jsonl" in caplog.text


def test_a_new_tracker_does_not_continue_a_torn_line(tmp_path, caplog):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"step": 2, "a')
    Tracker(tmp_path, last_step=1).write_metrics(2, {"a": 1})

    assert [record["step"] for record in read_lines(tmp_path / "metrics.jsonl")] == [1, 2]
    assert "metrics.jsonl:2: skipped" in caplog.text


def test_lines_that_are_no_record_are_named_with_their_number(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n[1]\n{"step": true}\n\xff\n{"step": 2}\n')

    assert [record["step"] for record in read_lines(path)] == [1, 2]
    assert all(f"metrics.jsonl:{number}" in caplog.text for number in (2, 3, 4))


@settings(max_examples=200, deadline=None)
@given(RECORDS, st.integers(0, 20), st.data())
def test_a_file_torn_at_any_byte_is_cut_back_to_its_whole_records(
    tmp_path_factory, records, step, data
):
    path = tmp_path_factory.mktemp("torn") / "metrics.jsonl"
    append_lines(path, records)
    whole = path.read_bytes()
    torn = whole[: data.draw(st.integers(0, len(whole)))]
    path.write_bytes(torn)
    expected = [record for record in records[: torn.count(b"\n")] if record["step"] <= step]

    logging.disable(logging.WARNING)
    try:
        cut_back(path, step)
        assert read_lines(path) == expected
        append_lines(path, [{"step": step + 1}])
        assert read_lines(path) == [*expected, {"step": step + 1}]
    finally:
        logging.disable(logging.NOTSET)
    assert [file.name for file in path.parent.iterdir()] == ["metrics.jsonl"]


def test_a_full_disk_names_the_file_and_the_bytes_free(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")

    with pytest.raises(SpmdflowError, match=r"metrics\.jsonl: No space left.*bytes are free.*run"):
        append_lines(tmp_path / "metrics.jsonl", [{"step": 1}])
