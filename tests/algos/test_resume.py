"""An interrupted and resumed run equals an uninterrupted one in every bit: weights and metrics."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import constants
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers import AutoModelForSequenceClassification as SequenceClassification

from spmdflow import export
from spmdflow.blocks.box import Box
from spmdflow.checkpoint.state import StateFiles
from spmdflow.config.load import load
from spmdflow.controller.script import run_flow
from spmdflow.errors import ConfigError
from spmdflow.runtime.call import InprocTransport
from spmdflow.tracking.reading import RunFiles
from spmdflow.tracking.tracker import read_lines
from tests.algos.runs import (
    ROOT,
    SCRIPT,
    SMALL,
    check_prediction,
    finish,
    last_checkpoint,
    log_of,
    numbers_of,
    ranks_of,
    run_ranks,
    steps_of,
    torchrun,
    wait_for_step,
    wait_until,
)
from tests.hub import TOKEN, files_of, serve

STEPS = 4
SAMPLED = ("data.eval_prompts=16", "data.eval_samples=2")
SETTINGS = (f"total_steps={STEPS}", "save_every=1", "eval_every=2", *SAMPLED)
HELD = ROOT / "tests" / "algos" / "programs" / "held.py"
"""PPO whose last step waits as long as there is the file of `hold`: it is killed before its end."""
POINTS = random.Random(20).sample(range(12, 62), 17)
"""Orders after which a run is interrupted: any call of any step, saving included."""


class Interrupted(Exception):
    """Stands for a kill between two orders."""


def run(
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch | None = None,
    *,
    stop_after: int = 0,
    words: Sequence[str] = (),
) -> int:
    loaded = load(SCRIPT, None, [*SMALL, *SETTINGS, *words, f"run.dir={run_dir}"])
    if monkeypatch is not None:
        count = 0
        real = InprocTransport._run

        def counted(self, pending):
            nonlocal count
            count += 1
            if count > stop_after:
                raise Interrupted
            real(self, pending)

        monkeypatch.setattr(InprocTransport, "_run", counted)
    return run_flow(loaded.script, loaded.cfg, inproc=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    run(run_dir)
    return run_dir


@pytest.mark.parametrize(
    "point",
    [
        *POINTS[:1],
        *(pytest.param(point, marks=pytest.mark.drill) for point in POINTS[1:3]),
        *(pytest.param(point, marks=pytest.mark.slow) for point in POINTS[3:]),
    ],
)
def test_a_run_interrupted_anywhere_continues_to_the_same_bits(point, whole, tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        run(run_dir, patch, stop_after=point)

    run(run_dir)

    assert last_checkpoint(run_dir) == last_checkpoint(whole)
    assert numbers_of(run_dir) == numbers_of(whole), [
        {k: (a.get(k), b.get(k)) for k in a.keys() | b.keys() if a.get(k) != b.get(k)}
        for a, b in zip(numbers_of(run_dir), numbers_of(whole), strict=False)
    ]


def test_weights_from_torchs_distributed_checkpoint_begin_the_same_run(whole, tmp_path):
    source = ROOT / "algos" / "arithmetic" / "model"
    folder = tmp_path / "model"
    dcp.save({"model": load_file(source / "model.safetensors")}, checkpoint_id=folder, no_dist=True)
    for path in source.glob("*.json"):
        shutil.copy(path, folder)

    run(tmp_path / "run", words=("total_steps=1", f"actor.model.path={folder}"))

    assert numbers_of(tmp_path / "run") == numbers_of(whole)[:2]


def test_sigterm_in_one_process_saves_the_running_step_and_the_restart_ends_the_same(
    whole, tmp_path, monkeypatch
):
    run_dir = tmp_path / "run"
    real = InprocTransport._run
    seen = []

    def terminated(self, pending):
        seen.append(pending)
        if len(seen) == POINTS[0]:
            signal.raise_signal(signal.SIGTERM)
        real(self, pending)

    with monkeypatch.context() as patch:
        patch.setattr(InprocTransport, "_run", terminated)
        status = run(run_dir)
    last = steps_of(run_dir)[-1]["step"]
    saved = (run_dir / "checkpoints" / "latest").read_text().strip()

    assert (status, saved) == (3, f"step-{last}") and last < STEPS
    assert run(run_dir) == 0
    assert last_checkpoint(run_dir) == last_checkpoint(whole)
    assert numbers_of(run_dir) == numbers_of(whole)


def test_each_call_is_one_line_of_the_list_also_in_a_run_that_was_interrupted(
    whole, tmp_path, monkeypatch
):
    run_dir = tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        run(run_dir, patch, stop_after=POINTS[0])
    assert run(run_dir) == 0

    by_run = [calls_of(folder) for folder in (whole, run_dir)]
    assert by_run[0] == by_run[1]
    called = [line for line in by_run[0] if line[0] == STEPS]
    assert [label for _, label, *_ in called].count("actor.update_actor") == 1
    (update,) = [line for line in called if line[1] == "actor.update_actor"]
    assert update[2:] == ("call", "train", [[0, 0]])
    times = [line for line in read_lines(whole / "calls.jsonl") if "start" in line]
    assert times and all(line["start"] <= line["end"] for line in times)
    lines = [line["line"] for line in times if line["label"] == "actor.update_actor"]
    assert all("ppo.py:" in line and "update_actor" in line for line in lines)
    # so are the tokens of its steps, and each start has a line of its own
    assert tokens_of(run_dir) == tokens_of(whole)
    assert [step for step, *_ in tokens_of(run_dir)] == list(range(1, STEPS + 1))
    starts = read_lines(run_dir / "launches.jsonl")
    assert [start["launch"] for start in starts] == list(range(1, len(starts) + 1))
    assert starts[-1]["step"] > 1, "the last start continued"


def tokens_of(run_dir):
    """The tokens and lengths of each step, which do not depend on interruptions either."""
    names = ("step", "trained", "dropped", "prompt_lengths", "response_lengths", "passes")
    return [tuple(line[name] for name in names) for line in RunFiles(run_dir).throughput]


def calls_of(run_dir):
    """What is the same however often a run was interrupted: the calls of its steps."""
    names = ("step", "label", "operation", "phase", "ranks")
    lines = [line for line in read_lines(run_dir / "calls.jsonl") if line["step"] > 0]
    return [tuple(line[name] for name in names) for line in lines if line["operation"] != "save"]


def test_a_finished_run_started_again_does_nothing(whole):
    before = last_checkpoint(whole)

    run(whole)

    assert [step["step"] for step in steps_of(whole)] == list(range(STEPS + 1))
    assert last_checkpoint(whole) == before


@pytest.fixture(scope="module")
def whole_on_ranks(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("ranks") / "run"
    run_ranks(run_dir, *SETTINGS, num_ranks=2)
    return run_dir


def hold(run_dir: Path) -> Path:
    """Keep a run from beginning its last step until the file is removed."""
    path = run_dir.with_name(f"{run_dir.name}.hold-{STEPS}")
    path.touch()
    return path


def start_held(run_dir: Path, *rendezvous: str) -> subprocess.Popen[str]:
    words = (str(SCRIPT.with_suffix(".yaml")), *SMALL, *SETTINGS)
    return torchrun(
        run_dir, num_ranks=2, script=HELD, small=words, rendezvous=("--standalone", *rendezvous)
    )


@pytest.mark.parametrize(
    ("step", "victim"),
    [
        pytest.param(1, 1, marks=pytest.mark.slow),
        pytest.param(2, 0, marks=pytest.mark.slow),
        pytest.param(3, 1, marks=pytest.mark.slow),
    ],
)
def test_kill_9_of_a_rank_and_a_restart_give_the_same_bits(step, victim, whole_on_ranks, tmp_path):
    run_dir = tmp_path / "run"
    held = hold(run_dir)
    process = start_held(run_dir)
    wait_for_step(run_dir, step)
    pids = [pid for pid in ranks_of(run_dir) if pid != process.pid]
    os.kill(pids[victim], signal.SIGKILL)
    assert finish(process, seconds=100) != 0
    assert ranks_of(run_dir) == []

    held.unlink()
    assert finish(start_held(run_dir)) == 0, log_of(run_dir).read_text()[-4000:]

    assert last_checkpoint(run_dir) == last_checkpoint(whole_on_ranks)
    assert numbers_of(run_dir) == numbers_of(whole_on_ranks)


def at_start(run_dir: Path) -> None:
    wait_until(lambda: "batch  " in log_of(run_dir).read_text(), run_dir)
    time.sleep(1.0)


def in_a_step(run_dir: Path) -> None:
    wait_for_step(run_dir, 2)


def while_saving(run_dir: Path) -> None:
    wait_until(lambda: any((run_dir / "checkpoints").glob("step-2*")), run_dir)


@pytest.mark.parametrize(
    ("moment", "victim"),
    list(itertools.product((at_start, in_a_step, while_saving), (0, 1))),
)
@pytest.mark.slow  # test_interrupted.py has such restarts by default
def test_killed_rank_under_max_restarts_goes_on_by_itself_to_the_same_bits(
    moment, victim, whole_on_ranks, tmp_path
):
    run_dir = tmp_path / "run"
    held = hold(run_dir)
    process = start_held(run_dir, "--max-restarts=2")
    moment(run_dir)
    pids = [pid for pid in ranks_of(run_dir) if pid != process.pid]
    os.kill(pids[victim], signal.SIGKILL)
    held.unlink()

    assert finish(process) == 0, log_of(run_dir).read_text()[-4000:]
    assert ranks_of(run_dir) == []
    assert last_checkpoint(run_dir) == last_checkpoint(whole_on_ranks)
    assert numbers_of(run_dir) == numbers_of(whole_on_ranks)


@pytest.mark.slow
def test_time_limit_counts_from_the_start_of_torchrun_also_after_its_restart(tmp_path):
    run_dir = tmp_path / "run"
    began = time.monotonic()
    limit = 60
    settings = (f"run.max_seconds={limit}", "total_steps=100000", "eval_every=0", "save_every=1")
    restarting = ("--standalone", "--max-restarts=1")
    process = torchrun(run_dir, *settings, num_ranks=2, rendezvous=restarting)
    wait_for_step(run_dir, 2, seconds=limit)
    os.kill([pid for pid in ranks_of(run_dir) if pid != process.pid][1], signal.SIGKILL)
    killed = time.monotonic() - began

    assert finish(process, seconds=2 * limit) == 0, log_of(run_dir).read_text()[-4000:]

    assert killed > 5 and time.monotonic() - began < limit + 3
    assert "run.max_seconds: step" in log_of(run_dir).read_text()
    last = steps_of(run_dir)[-1]["step"]
    assert (run_dir / "checkpoints" / "latest").read_text() == f"step-{last}\n"


@pytest.mark.drill
def test_sigterm_saves_the_running_step_and_the_restart_continues_after_it(tmp_path):
    run_dir = tmp_path / "run"
    settings = ("eval_every=1", "save_every=0", "placement=split")
    process = torchrun(run_dir, "total_steps=1000", *settings, num_ranks=2)
    wait_for_step(run_dir, 1)
    process.send_signal(signal.SIGTERM)
    finish(process)  # torchrun itself gives the ranks 30
    check_prediction(run_dir)  # of a run that was stopped, too
    assert ranks_of(run_dir) == []
    last = steps_of(run_dir)[-1]["step"]
    saved = [path.name for path in (run_dir / "checkpoints").glob("step-*")]
    assert saved == [f"step-{last}"], log_of(run_dir).read_text()[-3000:]

    more = (f"total_steps={last + 2}", *settings)
    run_ranks(run_dir, *more, num_ranks=2)

    assert [step["step"] for step in steps_of(run_dir)] == list(range(last + 3))
    check_prediction(run_dir)
    compared = json.loads((run_dir / "prediction.json").read_text())
    assert compared["steps"] == [last + 1, last + 2], "those of the second launch"
    assert compared["bytes_agree"] and compared["edges"], compared


@pytest.mark.slow
def test_3d_run_in_two_parts_equals_one_in_every_bit(tmp_path: Path) -> None:
    layouts = (
        "actor.engine.kind=megatron",
        "actor.engine.layout=t2p2",
        "critic.engine.kind=megatron",
        "critic.engine.layout=p2",
        "reference.engine.kind=zero3",
        "save_every=2",
        "run.keep_checkpoints=3",
    )
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    for run_dir, total in ((whole, 6), (parts, 2), (parts, 6)):
        run_ranks(run_dir, *layouts, f"total_steps={total}", num_ranks=4)

    assert numbers_of(whole) == numbers_of(parts)
    assert last_checkpoint(whole) == last_checkpoint(parts)


def test_run_whose_newest_checkpoint_is_damaged_continues_from_the_one_before_to_the_same_bits(
    whole, tmp_path, caplog
):
    run_dir = tmp_path / "run"
    shutil.copytree(whole, run_dir, symlinks=True)
    path = run_dir / "checkpoints" / f"step-{STEPS}" / "critic" / "rank-0.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)

    assert run(run_dir) == 0

    assert f"{path} has other bytes in" in caplog.text
    assert f"CONTINUES FROM step-{STEPS - 1}" in caplog.text
    names = {path.name for path in (run_dir / "checkpoints").iterdir()}
    assert names == {"latest", f"step-{STEPS - 1}", f"step-{STEPS}", f"step-{STEPS}.damaged"}
    assert last_checkpoint(run_dir) == last_checkpoint(whole)
    assert numbers_of(run_dir) == numbers_of(whole)


def test_run_at_its_time_limit_saves_ends_well_and_continues_to_the_same_bits(whole, tmp_path):
    run_dir = tmp_path / "run"
    limit = ("run.max_seconds=1", "save_every=3")

    assert run(run_dir, words=limit) == 0  # this process is older than a second

    assert [step["step"] for step in steps_of(run_dir)] == [0, 1]
    assert (run_dir / "checkpoints" / "latest").read_text() == "step-1\n"
    assert run(run_dir) == 0
    assert last_checkpoint(run_dir) == last_checkpoint(whole)
    assert numbers_of(run_dir) == numbers_of(whole)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_any_trained_model_of_a_checkpoint_is_exported(whole, tmp_path, capsys, dtype):
    words = [] if dtype is None else ["--dtype", dtype]
    for role, head in (("actor", AutoModelForCausalLM), ("critic", SequenceClassification)):
        to = tmp_path / role
        assert export.main([str(whole), "--model", role, "--to", str(to), *words]) == 0

        state = StateFiles(whole / "checkpoints" / f"step-{STEPS}" / role)
        model = head.from_pretrained(to, dtype="auto")
        for name, values in model.named_parameters():
            trained = state.read(name, Box.of_shape(values.shape))
            assert torch.equal(values, trained.to(values.dtype)), name
            assert str(values.dtype) == f"torch.{dtype or 'float32'}" or name == "score.weight"
        if dtype is None and role == "actor":  # as the run itself has exported it
            ours = to / "model.safetensors"
            theirs = whole / "export/actor/model.safetensors"
            assert ours.read_bytes() == theirs.read_bytes()
        assert (to / "tokenizer.json").is_file()
    assert f"critic after step {STEPS}" in capsys.readouterr().out


def test_what_cannot_be_exported_is_said_with_the_choices(whole, tmp_path, capsys):
    (tmp_path / "used").touch()

    assert export.main([str(whole), "--model", "reward", "--to", str(tmp_path / "to")]) == 2
    assert "expected --model of actor or critic; choose one" in capsys.readouterr().err
    assert export.main([str(tmp_path), "--to", str(tmp_path / "to")]) == 2
    assert "expected a checkpoint" in capsys.readouterr().err
    assert export.main([str(whole), "--to", str(tmp_path)]) == 2
    assert "which holds files" in capsys.readouterr().err


def test_a_finished_run_pushes_its_model_and_a_refused_push_is_found_before_the_run(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # needs a server of its own
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    settings = [*SMALL, "total_steps=1", "save_every=1", f"run.dir={tmp_path / 'run'}"]
    loaded = load(SCRIPT, None, [*settings, "run.push_to_hub=me/model"])

    with serve({}) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        assert run_flow(loaded.script, loaded.cfg, inproc=True) == 0
        assert run_flow(loaded.script, loaded.cfg, inproc=True) == 0  # the repository is there
        loaded = load(SCRIPT, None, [*settings, "run.push_to_hub=no/rights"])
        with pytest.raises(ConfigError, match="no/rights .*403.*expected a repository that HF_TO"):
            run_flow(loaded.script, loaded.cfg, inproc=True)

    assert hub.commits == 2 * ["actor after step-1"]
    assert hub.asked["POST objects"] >= 1 and len(hub.objects) == 1
    exported = files_of(tmp_path / "run" / "export" / "actor")
    assert hub.repositories == {"models/me/model": exported}
