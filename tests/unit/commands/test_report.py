"""`python -m spmdflow.report`: text and picture from metrics.jsonl."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from spmdflow.errors import DataError
from spmdflow.report import drawn_keys, main
from spmdflow.requirement import install_command
from spmdflow.tracking.tracker import Tracker


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    tracker = Tracker(tmp_path)
    for step in range(21):
        metrics = {"time/step_seconds": 2.0, "time/update_actor_seconds": 0.5}
        metrics |= {"reward/mean": step / 20, "custom/x": -1.0} if step else {}
        metrics |= {"eval/accuracy": 0.5 + step / 50} if step % 10 == 0 else {}
        tracker.write_metrics(step, metrics)
    return tmp_path


def test_report_shows_curves_values_and_stages(run_dir, capsys):
    assert main([str(run_dir)]) == 0

    text = capsys.readouterr().out
    assert "steps 0 to 20" in text
    assert text.index("eval/accuracy") < text.index("reward/mean") < text.index("metric  ")
    lines = [line.split() for line in text.splitlines()]
    assert ["eval/accuracy", "0.5", "0.5", "0.9", "0.9"] in lines
    assert ["reward/mean", "0.05", "0.05", "1", "1"] in lines
    assert ["actor", "10.5", "25.0%"] in lines
    assert max(map(len, text.splitlines()[1:-1])) <= 80


def test_report_writes_a_picture(run_dir, capsys):
    main([str(run_dir)])

    picture = (run_dir / "curve.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 5000
    assert capsys.readouterr().out.endswith(f"curve: {run_dir / 'curve.png'}\n")


def test_report_draws_the_keys_asked_for(run_dir, capsys):
    assert main([str(run_dir), "--keys", "custom/x", "--png", str(run_dir / "x.png")]) == 0

    text = capsys.readouterr().out
    assert text.splitlines()[2] == "custom/x"
    assert (run_dir / "x.png").exists() and not (run_dir / "curve.png").exists()


def test_report_of_a_running_run_with_a_torn_line_works(run_dir, capsys):
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "rew')

    assert main([str(run_dir)]) == 0
    assert "steps 0 to 20" in capsys.readouterr().out


def test_report_leaves_out_values_that_were_not_finite(run_dir, capsys):
    Tracker(run_dir, last_step=20).write_metrics(21, {"reward/mean": float("nan")})

    assert main([str(run_dir)]) == 0
    assert ["reward/mean", "0.05", "0.05", "1", "1"] in [
        line.split() for line in capsys.readouterr().out.splitlines()
    ]


@pytest.mark.parametrize("content", [None, ""])
def test_report_without_metrics_says_what_it_looked_for(tmp_path, capsys, content):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)

    assert main([str(tmp_path)]) == 2
    assert f"report: {tmp_path / 'metrics.jsonl'} is" in capsys.readouterr().err


def test_report_of_an_unknown_key_lists_the_known_ones(run_dir, capsys):
    assert main([str(run_dir), "--keys", "reward/men"]) == 2
    assert (
        "no step has reward/men, expected names of metrics (did you mean reward/mean?)"
        in capsys.readouterr().err
    )


def test_report_without_matplotlib_is_text_and_says_how_to_get_pictures(
    run_dir, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    assert main([str(run_dir)]) == 0
    assert capsys.readouterr().out.endswith(
        f"curve: no picture without matplotlib; {install_command('plot')}\n"
    )


def test_report_into_a_folder_that_cannot_be_written_is_still_text(run_dir, capsys):
    png_path = run_dir / "metrics.jsonl" / "curve.png"

    assert main([str(run_dir), "--png", str(png_path)]) == 0
    assert "no picture: cannot write" in capsys.readouterr().out


def test_key_that_no_step_has_is_answered_with_the_nearest_names() -> None:
    records = [{"step": 1, "actor/approx_kl": 0.1, "reward/mean": 1.0}]

    with pytest.raises(DataError, match=r"actor/kl, .* \(did you mean actor/approx_kl\?\)"):
        drawn_keys(records, ["actor/kl"])


def test_report_tells_failures_predicted_seconds_and_settings_that_differ(
    run_dir: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path_factory.mktemp("other")
    Tracker(other).write_metrics(1, {"reward/mean": 1.0})
    for folder, lr in ((run_dir, 0.1), (other, 0.2)):
        (folder / "config.yaml").write_text(f"run: {{seed: 0}}\nactor: {{lr: {lr}}}\n")
    failure = {"rank": 1, "role": "reward", "method": "score", "call": 7, "cause": "no judge"}
    (run_dir / "failure.json").write_text(json.dumps(failure))
    (run_dir / "config.until-step-4.yaml").write_text("run: {seed: 0}\nactor: {lr: 0.3}\n")
    stage = {"stage": "step", "predicted": 1.0, "measured": 2.0}
    (run_dir / "prediction.json").write_text(json.dumps({"stages": [stage]}))

    assert main([str(run_dir), str(other)]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert "failure.json: rank 1, reward.score (call 7): no judge" in lines
    assert "a step: predicted 1 s, measured 2 s (prediction.txt)" in lines
    assert "config.until-step-4.yaml: actor.lr: 0.3 -> 0.1" in lines
    assert [line.split() for line in lines[-3:]] == [
        ["actor.lr"],
        ["0.1", run_dir.name],
        ["0.2", other.name],
    ]


def test_report_shows_held_out_samples_of_the_first_and_last_step(run_dir, capsys):
    lines = []
    for step, phase in ((0, "eval"), (1, "train"), (10, "eval"), (20, "eval")):
        for number in range(6):
            sample = {"prompt": f"prompt {number % 5}", "response": f"{phase} {step} {number}"}
            lines.append(json.dumps({"step": step, "phase": phase, "score": None, **sample}))
    (run_dir / "samples.jsonl").write_text("\n".join(lines) + "\n")

    assert main([str(run_dir), "--samples"]) == 0

    text = capsys.readouterr().out
    assert text.index("samples of step 0") < text.index("samples of step 20")
    shown = [f"eval {step} {number}" for step in (0, 20) for number in range(4)]
    assert [name for name in shown if name in text] == shown
    for name in ("train 1", "eval 10", "eval 0 4", "eval 0 5"):
        assert name not in text
