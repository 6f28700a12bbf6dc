"""The recipes for real models: each can be planned from a config.json, and fits its GPUs.

The table of launch/README.md says what a rank needs; here it is compared with the plan.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from spmdflow.config.load import load
from spmdflow.plan.__main__ import FINE, main
from spmdflow.plan.trace import trace
from tests.unit.planned import ALGORITHMS, ROOT, row_problems, settings_of

_SHARED: dict[str, Any] = {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768}
_QWEN = {**_SHARED, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
_MIXTURE = {**_SHARED, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
_LLAMA = {**_SHARED, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def shape(hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, vocabulary: int) -> Any:
    """The sizes of a config.json."""
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocabulary,
        "tie_word_embeddings": hidden < 1000,
    }


def experts(size: int) -> Any:
    """128 experts of this inner width in each layer, 8 of them for a token."""
    counts = {"num_experts": 128, "num_experts_per_tok": 8}
    return counts | {"moe_intermediate_size": size, "head_dim": 128, "norm_topk_prob": True}


MODELS = {
    "0.5B": _QWEN | shape(896, 24, 14, 2, 4864, 151936),  # Qwen2.5
    "7B": _QWEN | shape(3584, 28, 28, 4, 18944, 152064),
    "32B": _QWEN | shape(5120, 64, 40, 8, 27648, 152064),
    "7B-long": _QWEN | shape(3584, 28, 28, 4, 18944, 152064) | {"max_position_embeddings": 131072},
    "32B-long": _QWEN | shape(5120, 64, 40, 8, 27648, 152064) | {"max_position_embeddings": 131072},
    "70B": _LLAMA | shape(8192, 80, 64, 8, 28672, 128256),  # Llama 3.1
    "30B-A3B": _MIXTURE | shape(2048, 48, 32, 4, 6144, 151936) | experts(768),  # Qwen3
    "gpt-oss-20b": _SHARED
    | shape(2880, 24, 64, 8, 2880, 201088)
    | {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "head_dim": 64}
    | {"num_local_experts": 32, "num_experts_per_tok": 4, "hidden_act": "silu"},
    "235B-A22B": _MIXTURE | shape(4096, 94, 64, 4, 12288, 151936) | experts(1536),
}


@dataclass(frozen=True)
class Recipe:
    """A script with its settings, for a model on a number of GPUs."""

    script: str
    model: str
    world: int


RECIPES = {
    "grpo_gsm8k": Recipe("grpo", "0.5B", 1),
    "grpo_7b": Recipe("grpo", "7B", 8),
    "grpo_32b": Recipe("grpo", "32B", 64),
    "grpo_7b_128k": Recipe("grpo", "7B-long", 8),
    "grpo_32b_128k": Recipe("grpo", "32B-long", 64),
    "ppo_70b": Recipe("ppo", "70B", 128),
    "grpo_30b_a3b": Recipe("grpo", "30B-A3B", 16),
    "grpo_gpt_oss_20b": Recipe("grpo", "gpt-oss-20b", 8),
    "grpo_235b_a22b": Recipe("grpo", "235B-A22B", 128),
}


def words_of(name: str, folder: Path, hardware: str) -> list[str]:
    """The command line that plans a recipe; folder gets its models, as config.json alone."""
    recipe = RECIPES[name]
    config = MODELS[RECIPES[name].model]
    kinds = {"actor": config}
    if recipe.script == "ppo":
        kinds["reward"] = config | {"architectures": ["LlamaForSequenceClassification"]}
        kinds["reward"]["num_labels"] = 1
    for role, values in kinds.items():
        (folder / role).mkdir()
        (folder / role / "config.json").write_text(json.dumps(values))
    return [
        *(str(ALGORITHMS / f"{recipe.script}.py"), str(ALGORITHMS / f"{name}.yaml")),
        *(f"{role}.model.path={folder / role}" for role in kinds),
        *(f"--world={recipe.world}", f"--hardware={hardware}", "--no-data", "--json"),
    ]


def peak_in_the_table(name: str) -> tuple[float, str]:
    """(GB, phase) of a recipe, as launch/README.md says."""
    rows = [line.split("|") for line in (ROOT / "launch" / "README.md").read_text().splitlines()]
    (row,) = (row for row in rows if len(row) == 8 and row[1].strip() == f"`algos/{name}.yaml`")
    return float(row[5]), row[6].strip()


@pytest.mark.parametrize("hardware", ["h100", "a100_80gb"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.drill if recipe.world > 64 else [])
        for name, recipe in RECIPES.items()
    ],
)
def test_recipe_is_planned_from_a_config_alone_and_fits(
    name: str, hardware: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(words_of(name, tmp_path, hardware))
    report = json.loads(capsys.readouterr().out)

    assert status == FINE, report["findings"]
    assert report["checks"]["memory"]
    peak = max(report["memory"], key=lambda phase: phase["total"])
    bytes_said, phase_said = peak_in_the_table(name)
    phase = peak["phase"].partition(".")[2]
    with capsys.disabled():
        share = peak["total"] / peak["budget"]
        print(f"\n{name}, {hardware}: {peak['total'] / 1e9:.1f} GB a rank ({share:.0%}) in {phase}")
    # the higher of both kinds of GPU is said
    assert 0.93 * bytes_said < peak["total"] / 1e9 < 1.01 * bytes_said
    assert phase == phase_said


@pytest.mark.parametrize("name", RECIPES)
def test_rows_of_a_recipe_are_proved(name: str, tmp_path: Path) -> None:
    script, config, *rest = words_of(name, tmp_path, "h100")
    loaded = load(script, config, [word for word in rest if not word.startswith("--")])
    settings = settings_of(RECIPES[name].world, node_size=8, backend="nccl")

    assert row_problems(trace(loaded.script, loaded.cfg, settings)) == []


def test_plan_says_what_divided_experts_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = words_of("grpo_30b_a3b", tmp_path, "h100")
    words.remove("--json")

    assert main(words) == FINE

    text = " ".join(capsys.readouterr().out.split())
    assert "a rank needs 10.3 GB of weights with e8; without it 61.1 GB, and the call would" in text


@pytest.mark.parametrize(
    ("kind", "options"), [("megatron", "[]"), ("fsdp", "[recompute]")], ids=["megatron", "fsdp"]
)
def test_automatic_placement_chooses_how_experts_are_divided(
    kind: str, options: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = words_of("grpo_30b_a3b", tmp_path, "h100")
    words.remove("--json")
    free = ["actor.engine.layout=t1", "reference.engine.layout=t1", "actor.rollout.layout=auto"]
    free += [f"{role}.engine.kind={kind}" for role in ("actor", "reference")]

    assert main([*words, *free, "placement=auto", f"actor.engine.options={options}"]) == FINE

    assert re.search(r"actor\.engine\.layout=t\d+p\d+(c\d+)?e\d+", capsys.readouterr().out)
