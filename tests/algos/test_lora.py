"""GRPO with adapters, end to end: resumed, on another layout too, exported both ways, refused."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import peft
import pytest
import torch
import transformers
from torch import Tensor

from spmdflow import export
from spmdflow.config.load import load
from spmdflow.controller.script import run_flow
from spmdflow.errors import CheckpointError, ConfigError
from tests.algos.runs import (
    FEW_SUMS,
    ROOT,
    check_prediction,
    log_of,
    numbers_of,
    run_ranks,
    steps_of,
)

SCRIPT = ROOT / "algos" / "grpo.py"
MODEL = ROOT / "algos" / "arithmetic" / "model"
SMALL = (
    *FEW_SUMS,
    "data.prompts_per_step=8",
    "data.samples_per_prompt=4",
    "actor.update.mini_batch_size=16",
    "actor.optimizer.schedule=constant",
    "actor.optimizer.warmup_steps=0",
    "actor.optimizer.lr=3e-3",
    "actor.model.lora.rank=4",
    "reference.shares=actor",
    "eval_every=0",
    "save_every=1",
    "run.sample_every=0",
)


def run(run_dir: Path, steps: int, words: Sequence[str] = ()) -> int:
    loaded = load(SCRIPT, None, [*SMALL, f"total_steps={steps}", *words, f"run.dir={run_dir}"])
    return run_flow(loaded.script, loaded.cfg, inproc=True)


def tensors_of(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: x.detach() for name, x in model.named_parameters()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps without a break."""
    run_dir = tmp_path_factory.mktemp("lora") / "whole"
    assert run(run_dir, 3) == 0
    return run_dir


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps on two ranks."""
    run_dir = tmp_path_factory.mktemp("lora") / "two"
    run_ranks(run_dir, "total_steps=2", num_ranks=2, script=SCRIPT, small=SMALL)
    return run_dir


def test_two_ranks_take_the_steps_of_one_and_send_the_planned_bytes(
    whole: Path, on_two: Path
) -> None:
    for one, two in zip(steps_of(whole), steps_of(on_two), strict=False):
        assert two["reward/mean"] == one["reward/mean"]
        assert two["actor/grad_norm"] == pytest.approx(one["actor/grad_norm"], rel=1e-4)
        assert two["rollout/weights_verified"] == 1
    assert "trains 17408 parameters next to 332416" in log_of(on_two).read_text()
    check_prediction(on_two)


def test_run_goes_on_bit_for_bit_and_on_another_layout_with_the_same_step(
    whole: Path, on_two: Path, tmp_path: Path
) -> None:
    assert run(tmp_path / "own", 2) == run(tmp_path / "own", 3) == 0
    shutil.copytree(on_two, tmp_path / "two", symlinks=True)
    assert run(tmp_path / "two", 3) == 0

    assert numbers_of(tmp_path / "own") == numbers_of(whole)
    expected = steps_of(whole)[-1]
    found = steps_of(tmp_path / "two")[-1]
    assert found["step"] == 3 and found["reward/mean"] == expected["reward/mean"]
    assert found["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-3)


def test_reference_of_its_own_gives_the_same_run(whole: Path, tmp_path: Path) -> None:
    assert run(tmp_path, 3, ["reference.shares=null"]) == 0

    assert numbers_of(tmp_path) == numbers_of(whole)


def test_exported_adapter_in_peft_and_exported_merged_model_are_one(
    whole: Path, tmp_path: Path
) -> None:
    assert export.main([str(whole), "--to", str(tmp_path / "merged")]) == 0
    assert export.main([str(whole), "--to", str(tmp_path / "adapter"), "--adapter"]) == 0

    auto = transformers.AutoModelForCausalLM
    base, merged = (auto.from_pretrained(path) for path in (MODEL, tmp_path / "merged"))
    start = {name: x.clone() for name, x in tensors_of(base).items()}
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
    ours = tensors_of(merged)
    expected = tensors_of(theirs)
    assert max(float((ours[n] - x).abs().max()) for n, x in expected.items()) < 1e-7
    moved = {n for n, x in expected.items() if not torch.equal(x, start[n])}
    assert moved == {n for n in start if "_proj" in n}
    file = "adapter_model.safetensors"
    assert (whole / "export/actor" / file).read_bytes() == (
        tmp_path / "adapter" / file
    ).read_bytes()
    assert (tmp_path / "merged/tokenizer.json").exists()


@pytest.mark.drill
def test_reference_that_shares_a_megatron_actor_gives_the_same_run(
    whole: Path, tmp_path: Path
) -> None:
    words = ["total_steps=2", "actor.engine.kind=megatron", "actor.engine.layout=t2"]
    words += ["reference.engine.kind=megatron", "reference.engine.layout=t2"]

    run_ranks(tmp_path / "two", *words, num_ranks=2, script=SCRIPT, small=SMALL)

    for one, two in zip(steps_of(whole), steps_of(tmp_path / "two"), strict=False):
        assert two["reward/mean"] == one["reward/mean"]
        assert two["actor/grad_norm"] == pytest.approx(one["actor/grad_norm"], rel=1e-4)
    check_prediction(tmp_path / "two")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that peft wrote: rslora, dropout, a head that is trained whole."""
    folder = tmp_path_factory.mktemp("lora") / "theirs"
    base = transformers.AutoModelForCausalLM.from_pretrained(MODEL)
    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "v_proj", "up_proj", "down_proj"],
        use_rslora=True,
        lora_dropout=0.1,
        modules_to_save=["lm_head"],
    )
    torch.manual_seed(0)
    model = peft.get_peft_model(base, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=1e-3)
    model.save_pretrained(folder)
    return folder


def from_theirs(folder: Path) -> list[str]:
    return [
        "actor.model.lora.rank=4",
        f"actor.model.lora.adapter={folder}",
        "reference.shares=null",
    ]


@pytest.fixture(scope="module")
def started(theirs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps from that adapter without a break."""
    run_dir = tmp_path_factory.mktemp("lora") / "started"
    assert run(run_dir, 3, from_theirs(theirs)) == 0
    return run_dir


def test_run_from_an_adapter_with_dropout_goes_on_bit_for_bit(
    started: Path, theirs: Path, tmp_path: Path
) -> None:
    words = from_theirs(theirs)

    assert run(tmp_path, 2, words) == run(tmp_path, 3, words) == 0

    assert numbers_of(tmp_path) == numbers_of(started)


def test_adapter_that_was_trained_further_loads_in_peft_as_the_merged_model(
    started: Path, theirs: Path, tmp_path: Path
) -> None:
    assert export.main([str(started), "--to", str(tmp_path / "merged")]) == 0

    auto = transformers.AutoModelForCausalLM
    ids = torch.arange(14).view(2, 7)
    ours = peft.PeftModel.from_pretrained(auto.from_pretrained(MODEL), started / "export/actor")
    begun = peft.PeftModel.from_pretrained(auto.from_pretrained(MODEL), theirs)
    merged = auto.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        logits = [model.eval()(ids).logits for model in (ours, merged, begun)]
    assert float((logits[0] - logits[1]).abs().max()) < 1e-4  # of logits that reach 24
    assert float((logits[0] - logits[2]).abs().max()) > 1e-2
    config = peft.LoraConfig.from_pretrained(started / "export/actor")
    assert config.use_rslora and config.lora_dropout == 0.1 and config.lora_alpha == 8
    assert config.modules_to_save == ["lm_head"] and len(config.target_modules) == 4


@pytest.mark.drill
@pytest.mark.parametrize(
    "layout",
    [
        ("actor.engine.kind=fsdp", "actor.engine.micro_batch_rows=3"),
        ("actor.engine.kind=megatron", "actor.engine.layout=t1"),
        ("actor.engine.kind=megatron", "actor.engine.layout=t2"),
    ],
    ids=["fsdp", "megatron t1", "megatron t2"],
)
def test_other_engines_take_the_same_steps_with_the_same_dropout(
    layout: tuple[str, ...], started: Path, theirs: Path, tmp_path: Path
) -> None:
    words = ["total_steps=2", *from_theirs(theirs), *layout]

    run_ranks(tmp_path / "two", *words, num_ranks=2, script=SCRIPT, small=SMALL)

    for one, two in zip(steps_of(started), steps_of(tmp_path / "two"), strict=False):
        assert two["reward/mean"] == one["reward/mean"]
        assert two["actor/grad_norm"] == pytest.approx(one["actor/grad_norm"], rel=1e-3)
        assert two["rollout/weights_verified"] == 1
    check_prediction(tmp_path / "two")
    shutil.copytree(tmp_path / "two", tmp_path / "one", symlinks=True)
    assert run(tmp_path / "one", 3, from_theirs(theirs)) == 0  # under FSDP on one rank
    expected = steps_of(started)[-1]
    found = steps_of(tmp_path / "one")[-1]
    assert found["step"] == 3 and found["reward/mean"] == expected["reward/mean"]
    assert found["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-2)


def test_folder_of_adapters_is_refused_as_a_model_with_what_to_do(whole: Path) -> None:
    words = [*SMALL, f"actor.model.path={whole}"]
    with pytest.raises(ConfigError, match=r"step-3 with adapters alone.*spmdflow\.export"):
        load(SCRIPT, None, words)


def test_other_weights_than_those_that_were_adapted_are_refused(tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path / "model")
    words = [f"actor.model.path={tmp_path / 'model'}"]
    assert run(tmp_path / "run", 1, words) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    next(model.parameters()).data.mul_(1.1)
    model.save_pretrained(tmp_path / "model")

    with pytest.raises(CheckpointError, match=r"was written with the actor model of"):
        run(tmp_path / "run", 2, words)


def test_adapters_of_a_model_that_was_trained_whole_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["actor.model.lora=null", "reference.shares=null"]
    assert run(tmp_path / "run", 1, words) == 0

    assert export.main([str(tmp_path / "run"), "--to", str(tmp_path / "x"), "--adapter"]) == 2
    message = capsys.readouterr().err
    assert "which has no adapters, expected a model with adapters; omit --adapter" in message
