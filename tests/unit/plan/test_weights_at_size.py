"""Weights of large models in `python -m spmdflow.plan`: every edge is proved, in seconds."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spmdflow.plan.__main__ import FINE, main
from tests.unit.plan.test_command import PPO, large
from tests.unit.planned import SMALL


def weights_of_70b(folder: Path, kind: str, layout: str) -> list[str]:
    """The words of `large` with an actor of another engine and layout; copies to t_g 8."""
    words = [PPO, *large(folder), f"actor.engine.kind={kind}", f"actor.engine.layout={layout}"]
    words += ["actor.rollout.weights=copy", "actor.engine.options=[recompute]"]
    return [*words, "--hardware=h100", "--no-data"]


@pytest.mark.parametrize(
    ("kind", "layout", "world", "edges_per_rank"),
    [
        # a rank lacks three of its shard's four stages
        ("megatron", "t8p4", 64, 3),
        pytest.param("megatron", "t8p4", 128, 3, marks=pytest.mark.drill),
        # each receives from the others that train in its group
        ("fsdp", "s32", 64, 31),
        pytest.param("fsdp", "s64", 128, 63, marks=pytest.mark.drill),
    ],
)
def test_weights_of_70b_are_proved_on_every_edge_in_seconds(
    tmp_path: Path,
    kind: str,
    layout: str,
    world: int,
    edges_per_rank: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    started = time.process_time()

    main([*weights_of_70b(tmp_path, kind, layout), f"--world={world}", "--json"])

    assert time.process_time() - started < 20, "about 1 s on an idle core"
    plain = json.loads(capsys.readouterr().out)
    assert plain["checks"]["weights"] is True
    (way,) = plain["weights"]
    assert len(way["edges"]) == world * edges_per_rank


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout"), [("megatron", "t8p4"), ("fsdp", "s64")])
def test_weights_of_70b_on_1024_ranks_are_proved_in_a_minute_and_2_gb(
    tmp_path: Path, kind: str, layout: str
) -> None:
    words = [*weights_of_70b(tmp_path, kind, layout), "--world=1024"]
    program = (
        "import json, resource, sys\n"
        "from spmdflow.plan.__main__ import main\n"
        "main(sys.argv[1:])\n"
        "usage = resource.getrusage(resource.RUSAGE_SELF)\n"
        "print(json.dumps([usage.ru_utime + usage.ru_stime, usage.ru_maxrss]))\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=300
    )

    assert done.returncode == 0, done.stderr[-2000:]
    seconds, kilobytes = json.loads(done.stdout.splitlines()[-1])
    assert "ok       weights   1024 ranks get each element" in done.stdout
    assert seconds < 60 and kilobytes < 2e6


GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 64}
GPT_NEOX = {
    "model_type": "gpt_neox",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 64,
}


@pytest.mark.parametrize(
    ("config", "layout", "checked"),
    [
        (GPT2, "t1", "ok weights 2 ranks get each element that they lack once, over 2 edges"),
        (GPT2, "t2", "ok weights 2 ranks get each element that they lack once, over 2 edges"),
        (GPT_NEOX, "t1", "ok weights 2 ranks get each element that they lack once, over 2 edges"),
        (GPT_NEOX, "t2", "over 0 edges; the start checks the weights of actor to actor"),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else value[:2],
)
def test_weights_are_planned_unless_ranks_divide_a_family_that_is_not_recorded(
    config: dict[str, object],
    layout: str,
    checked: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = [PPO, *SMALL, f"actor.model.path={tmp_path}", "--world=2", "--hardware=h100"]

    status = main([*words, f"actor.rollout.layout={layout}", "--no-data"])

    text = " ".join(capsys.readouterr().out.split())
    assert checked in text
    assert ("their own loader says at the start" in text) == ("the start checks" in checked)
    assert status == FINE
