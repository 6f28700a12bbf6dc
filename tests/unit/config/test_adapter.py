"""An adapter to start from gives its settings; others that contradict them are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest

from spmdflow.config.check import problems
from spmdflow.config.load import load
from spmdflow.config.model import LoRAConfig
from spmdflow.errors import ConfigError
from tests.algos.runs import FEW_SUMS, ROOT

SCRIPT = ROOT / "algos" / "grpo.py"
MODEL = ROOT / "algos" / "arithmetic" / "model"


def write_adapter(folder: Path, **changes: Any) -> Path:
    """adapter_config.json as peft writes it."""
    config = peft.LoraConfig(
        r=8,
        lora_alpha=24,
        target_modules=["q_proj", "v_proj"],
        use_rslora=True,
        lora_dropout=0.05,
        modules_to_save=["lm_head"],
        base_model_name_or_path=str(MODEL),
    )
    config.save_pretrained(str(folder))
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


def lora_of(*words: str) -> LoRAConfig:
    cfg = load(SCRIPT, None, [*FEW_SUMS, *words]).cfg
    lora: LoRAConfig = cfg.actor.model.lora
    assert cfg.actor.rollout.lora == lora
    return lora


def test_settings_are_those_of_the_adapter(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path)

    lora = lora_of(f"actor.model.lora.adapter={folder}", "actor.model.lora.rank=8")

    assert (lora.rank, lora.alpha, lora.targets) == (8, 24.0, ["q_proj", "v_proj"])
    assert (lora.rslora, lora.dropout, lora.modules_to_save) == (True, 0.05, ["lm_head"])
    assert lora.scale == 24 / 8**0.5


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("rank=16", "got 16, expected 8, as in"),  # 16 is the default: it is given all the same
        ("alpha=8", "got 8.0, expected 24.0, as in"),
        ("targets=[q_proj]", r"got ['q_proj'], expected ['q_proj', 'v_proj'], as in"),
        ("rslora=false", "got False, expected True, as in"),
        ("dropout=0.2", "got 0.2, expected 0.05, as in"),
        ("modules_to_save=[embed_tokens]", "got ['embed_tokens'], expected ['lm_head'], as in"),
    ],
)
def test_settings_that_contradict_the_adapter_are_refused(
    word: str, expected: str, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path)
    name = word.partition("=")[0]

    with pytest.raises(ConfigError) as caught:
        lora_of(f"actor.model.lora.adapter={folder}", f"actor.model.lora.{word}")

    text = str(caught.value)
    assert f"actor.model.lora.{name}: {expected} {folder}/adapter_config.json; remove" in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_dora": True}, "with use_dora=True, expected plain LoRA without it; merge this"),
        ({"bias": "all"}, "with bias='all', expected plain LoRA without it"),
        ({"rank_pattern": {"q_proj": 4}}, "with rank_pattern={'q_proj': 4}, expected plain"),
        ({"something_new": 1}, "with something_new=1, expected plain LoRA without it"),
        ({"peft_type": "IA3"}, "with peft_type IA3, expected LORA; give a folder"),
        ({"target_modules": ".*q_proj"}, "with target_modules '.*q_proj', expected a list"),
        ({"init_lora_weights": "pissa"}, "which changes the weights of the base model"),
    ],
)
def test_adapters_of_another_kind_are_refused(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path, **changes)

    with pytest.raises(ConfigError) as caught:
        lora_of(f"actor.model.lora.adapter={folder}")

    assert str(caught.value).startswith(f"actor.model.lora.adapter: got {folder}")
    assert words in str(caught.value)


def test_folder_without_an_adapter_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model without adapter_config.json, expected a peft"):
        lora_of(f"actor.model.lora.adapter={MODEL}")


def test_adapter_as_the_path_of_a_model_is_refused_with_the_setting_for_it(
    tmp_path: Path,
) -> None:
    folder = write_adapter(tmp_path)
    cfg = load(SCRIPT, None, [*FEW_SUMS, f"actor.model.path={folder}"]).cfg

    found = [str(each) for each in problems(cfg, 1)]

    expected = f"{folder} with an adapter alone, expected a whole model; set actor.model.lora."
    assert any(f"actor.model.path: got {expected}adapter={folder}" in each for each in found)


SAVED = "actor.model.lora.modules_to_save=[lm_head]"
MEGATRON = ("actor.model.lora.rank=8", "actor.engine.kind=megatron")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            (SAVED, "reference.shares=actor"),
            "reference.shares: got actor with actor.model.lora.modules_to_save=['lm_head'], "
            "expected an actor whose own weights stay as they are; remove modules_to_save",
        ),
        (
            (SAVED, "actor.rollout.weights=adapter", "actor.rollout.engine=vllm"),
            "actor.rollout.weights: got adapter with actor.model.lora.modules_to_save=['lm_head'], "
            "expected adapters alone, as vLLM has no room for others; set actor.rollout.weights=",
        ),
        (
            ("actor.model.lora.dropout=0.1", "actor.engine.layout=c2"),
            "actor.model.lora.dropout: got 0.1 with actor.engine.layout=c2, expected whole rows on "
            "each rank, whose tokens give the masks; remove c2 from the layout",
        ),
        (
            (*MEGATRON, "actor.engine.layout=t2", "actor.engine.options=[sequence_parallel]"),
            "actor.model.lora: got adapters with actor.engine.options=[sequence_parallel], "
            "expected tensor-parallel ranks that have whole sequences; remove sequence_parallel",
        ),
        (
            (*MEGATRON, "actor.engine.layout=t2", "reference.shares=actor"),
            "reference.shares: got actor on megatron t2 with reference.engine fsdp t1, expected "
            "rows divided as the actor's are; set reference.engine.kind=megatron and reference.",
        ),
        (
            (*MEGATRON, "actor.rollout.weights=flat"),
            "actor.rollout.weights: got flat, expected copy here, because adapters are merged into "
            "copies of the weights; set actor.rollout.weights=auto",
        ),
    ],
)
def test_settings_that_adapters_cannot_have_are_refused(
    words: tuple[str, ...], expected: str
) -> None:
    cfg = load(SCRIPT, None, [*FEW_SUMS, *words]).cfg

    found = [str(each) for each in problems(cfg, 2)]

    assert any(each.startswith(expected) for each in found), found


@pytest.mark.parametrize("layout", ["t1", "t2"])
def test_adapters_under_megatron_are_accepted(layout: str) -> None:
    words = (*MEGATRON, f"actor.engine.layout={layout}", "actor.model.lora.dropout=0.1")

    assert list(problems(load(SCRIPT, None, [*FEW_SUMS, *words]).cfg, 2)) == []
