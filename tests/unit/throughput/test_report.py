"""`spmdflow report --throughput`: which steps count, the block, JSON, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spmdflow.errors import DataError
from spmdflow.report import main
from spmdflow.throughput.summary import Summary, summarize
from spmdflow.tracking.reading import RunFiles
from tests.unit.throughput.run_files import LAUNCH, step, write_lines, write_run


def summary_of(folder: Path, warm_up: int = 2) -> Summary:
    return summarize(RunFiles(folder), warm_up=warm_up)


def steps(*numbers: int, seconds: float = 2.0, **changes: Any) -> list[dict[str, Any]]:
    """Steps that begin so many seconds one after the other, and themselves end after 1.5 s."""
    return [step(number, place * seconds, **changes) for place, number in enumerate(numbers)]


def test_tokens_a_second_are_tokens_over_whole_seconds_behind_the_warm_up(tmp_path: Path) -> None:
    """Steps 3 and 4 take 2 s to the next one, step 5 the 1.5 s to its own end."""
    summary = summary_of(write_run(tmp_path, steps(1, 2, 3, 4, 5)))

    seconds = 2 + 2 + 1.5
    assert summary.num_measured == 3 and summary.num_warm_up == 2
    rates = summary.rates
    assert rates.seconds == seconds
    assert rates.trained == pytest.approx(3 * 400 / seconds)
    assert rates.trained_prompts == pytest.approx(3 * 80 / seconds)
    assert rates.trained_responses == pytest.approx(3 * 320 / seconds)
    assert rates.dropped == pytest.approx(3 * 100 / seconds)
    assert rates.dropped_responses == pytest.approx(3 * 80 / seconds)
    assert rates.failed == pytest.approx(3 * 40 / seconds)
    assert rates.stale == pytest.approx(3 * 80 / seconds)
    assert rates.generated == pytest.approx(3 * 540 / seconds)
    assert summary.to_plain()["tokens_per_second_per_device"] == pytest.approx(
        3 * 400 / seconds / 4
    )
    assert summary.plain_seconds is not None
    assert summary.plain_seconds.median == 2 and summary.plain_seconds.least == 1.5
    assert summary.prompt_lengths is not None and summary.prompt_lengths.rows == 24
    assert summary.response_lengths is not None and summary.response_lengths.mean == 40
    assert (summary.mean_age, summary.max_age) == (0.25, 1.0)
    assert summary.warnings == []


def test_steps_with_evaluation_or_saving_are_apart(tmp_path: Path) -> None:
    """A checkpoint is begun at the end of step 5, and written while step 6 runs."""
    records = steps(1, 2, 3, 4, 5, 6, 7)
    records[2]["evaluates"] = True
    records[5]["saves"] = True

    summary = summary_of(write_run(tmp_path, records))

    assert summary.plain_seconds is not None and summary.plain_seconds.count == 2
    assert summary.evaluating_seconds is not None and summary.evaluating_seconds.count == 1
    assert summary.saving_seconds is not None and summary.saving_seconds.count == 2
    assert summary.rates.seconds == 2 + 1.5
    assert summary.all_rates.seconds == 4 * 2 + 1.5


def test_run_that_always_evaluates_counts_all_steps_with_a_warning(tmp_path: Path) -> None:
    summary = summary_of(write_run(tmp_path, steps(1, 2, 3, evaluates=True)))

    assert summary.counts_all and summary.rates.num_steps == 1
    assert "every measured step evaluates or saves" in summary.warnings[0]


@pytest.mark.parametrize(
    ("numbers", "is_longer", "count"),
    [
        ((1, 2, 3, 4, 5, 6, 7, 8), "longer than the run (8); all steps but the first", 7),
        (range(1, 11), "as long as the run (10); all steps but the first", 9),
        ((1,), "longer than the run (1); all steps count", 1),
    ],
)
def test_warm_up_longer_than_the_run_is_told_and_the_other_steps_count(
    tmp_path: Path, numbers: Any, is_longer: str, count: int
) -> None:
    summary = summary_of(write_run(tmp_path, steps(*numbers)), warm_up=10)

    assert f"warning: warm-up (10 steps) is {is_longer}" in summary.warnings[0]
    assert summary.num_measured == count


def test_each_start_of_a_resumed_run_has_its_own_warm_up(tmp_path: Path) -> None:
    """The clock begins anew; step 4 has no next step in its start."""
    records = [*steps(1, 2, 3, 4), *steps(5, 6, 7, launch=2)]
    launches = [LAUNCH, {**LAUNCH, "launch": 2, "step": 5, "command": "again", "time": 2.0}]

    summary = summary_of(write_run(tmp_path, records, launches))

    assert summary.num_launches == 2 and summary.num_other_setup == 0
    assert summary.num_measured == 3, "steps 3, 4 and 7"
    assert summary.rates.seconds == 2 + 1.5 + 1.5
    assert summary.launch["command"] == "again"


@pytest.mark.parametrize(
    "changes", [{"ranks": 8}, {"git": {"package": {}, "script": {}}}, {"sizes": {}}]
)
def test_steps_of_a_start_with_another_setup_do_not_count(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    records = [*steps(1, 2, 3, 4), *steps(5, 6, 7, launch=2)]
    launches = [{**LAUNCH, **changes}, {**LAUNCH, "launch": 2, "step": 5}]

    summary = summary_of(write_run(tmp_path, records, launches))

    assert summary.num_other_setup == 4 and summary.num_measured == 1


def test_run_killed_while_it_wrote_a_line_is_reported_without_that_line(tmp_path: Path) -> None:
    write_run(tmp_path, steps(1, 2, 3, 4))
    with (tmp_path / "throughput.jsonl").open("a") as file:
        file.write('{"step": 5, "launch": 1, "beg')

    summary = summary_of(tmp_path)

    assert summary.last_step == 4 and summary.num_measured == 2
    assert "stopped before its last step" in summary.state


def test_run_of_an_earlier_version_says_what_is_not_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, steps(1, 2, 3, 4))
    (tmp_path / "throughput.jsonl").unlink()
    (tmp_path / "launches.jsonl").unlink()

    assert main([str(tmp_path), "--throughput", "--warm-up", "2"]) == 0

    text = capsys.readouterr().out
    assert "tokens/s    trained: not recorded; generated: 360" in text
    assert "devices     not recorded" in text and "versions    not recorded" in text
    assert "MFU         unknown, because RUN_DIR records no call of a model" in text
    assert "warning: RUN_DIR has no throughput.jsonl" in text


def test_block_shows_everything_that_a_claim_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, steps(*range(1, 31)))

    assert main([str(tmp_path), "--throughput"]) == 0

    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "steps 1 to 30 in 1 start",
        "20 of 30 steps, without the first 10 (warm-up: 10 of each start)",
        "whole steps, weight sync included: median 2, middle half 2 to 2, least 1.5, most 2",
        "203 trained (prompts 40.5, responses 162), over 20 steps in 39.5 s",
        "50.6 per device (4 ranks)",
        "generated and dropped: 50.6 tokens/s, 25.0% of the trained ones",
        "skipped as failed: 20.3 tokens/s, 10.0% of the trained ones",
        "rows begun with older weights: 40.5 tokens/s, 20.0% of the trained ones; age of tokens: "
        "mean 0.25, at most 1",
        "prompts mean 10.0, p50 10, p90 10, p99 10, max 10 tokens (160 trained rows)",
        "responses mean 40.0, p50 30, p90 50, p99 50, max 50 tokens (160 trained rows)",
        "4 ranks on 1 node, each on NVIDIA H100 80GB HBM3",
        "actor: ranks 0-3, layout t1p1d4, fsdp in bfloat16, generates with vllm in bfloat16",
        "2 prompts a step, group size 4",
        "bound: max_staleness 1",
        "peak of a device: 989 TFLOP/s in bfloat16",
        "PaLM, arXiv 2204.02311, appendix B",
        "reward/mean: first 10 steps 5.5, last 25.5",
        "actor/reference_kl: first 10 steps 0.055, last 0.255",
        "spmdflow 0.2.0, commit abc",
        "python 3.11.7, torch 2.13.0, vllm 0.32.0",
        "python -m spmdflow.run ppo",
    ):
        assert part in text, part


def test_several_runs_have_a_block_each_and_json_an_object_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = write_run(tmp_path / "one", steps(1, 2, 3))
    other = write_run(tmp_path / "other", steps(1, 2, 3, 4))
    words = [str(one), str(other), "--throughput", "--warm-up", "0"]

    assert main(words) == 0
    text = capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    reports = json.loads(capsys.readouterr().out)

    assert f"throughput of {one}\n" in text and f"\nthroughput of {other}\n" in text
    assert [report["num_measured"] for report in reports] == [3, 4]
    assert [report["run_dir"] for report in reports] == [str(one), str(other)]


@pytest.mark.parametrize(
    ("words", "key", "do"),
    [
        (("--json",), "--json without --throughput", "add --throughput"),
        (("--warm-up", "3"), "--warm-up without --throughput", "add --throughput"),
        (("--throughput", "--warm-up", "-1"), "--warm-up -1", "--warm-up 0"),
        (("--throughput", "--keys", "reward/mean"), "--keys with --throughput", "omit --keys"),
        (("--throughput", "--samples"), "--samples with --throughput", "omit --samples"),
        (("--throughput", "--png", "x.png"), "--png with --throughput", "omit --png"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], key: str, do: str
) -> None:
    write_run(tmp_path, steps(1, 2, 3))

    assert main([str(tmp_path), *words]) == 2

    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"report: got {key}, expected " in captured.err and do in captured.err


def test_run_without_a_finished_step_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path), "--throughput"]) == 2
    assert "metrics.jsonl is not there, expected one line per finished step" in (
        capsys.readouterr().err
    )

    write_lines(tmp_path / "metrics.jsonl", [{"step": 0, "eval/accuracy": 0.5}])
    with pytest.raises(DataError, match="only the evaluation before the first step, expected"):
        summary_of(tmp_path)
