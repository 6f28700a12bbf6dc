"""Each recipe for a real model starts, makes a step, evaluates and saves, with a tiny model on few
simulated devices: what only a start reads cannot be wrong in it either."""

from __future__ import annotations

import json
import math
from importlib.util import find_spec
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
import yaml

from scripts.families.tiny import save_tiny_model
from tests.rollout_reference import write_llama
from tests.simcuda.conftest import ROOT, Simulated

SMALL = (
    *("data.max_prompt_tokens=64", "data.prompts_per_step=8", "data.eval_prompts=4"),
    *("actor.update.mini_batch_size=8", "actor.rollout.max_new_tokens=8"),
    *("total_steps=1", "eval_every=1", "save_every=1"),
)
GROUPS = (*SMALL, "data.samples_per_prompt=2", "reward.num_processes=1")
CACHE = "actor.rollout.kv_cache_gib=0.0625"
ROLES = ("actor", "critic", "reference", "reward")
MIXTURE = ("actor.rollout.engine=builtin", "actor.rollout.layout=t1", "actor.update.router=replay")
"""The simulated devices lack vLLM's kernels for experts."""
RECIPES = {
    "grpo_30b_a3b": (
        "grpo",
        2,
        (*GROUPS, *MIXTURE, "actor.engine.layout=e2", "reference.engine.layout=e2"),
    ),
    "grpo_gpt_oss_20b": (
        "grpo",
        2,
        (*GROUPS, *MIXTURE, "actor.engine.layout=e2", "reference.engine.layout=e2"),
    ),
    "grpo_235b_a22b": (
        "grpo",
        4,
        (*GROUPS, *MIXTURE, "actor.engine.layout=p2e2", "reference.engine.layout=t2e2"),
    ),
    "grpo_gsm8k": ("grpo", 1, GROUPS),
    "grpo_7b": ("grpo", 2, (*GROUPS, CACHE)),
    "grpo_32b": ("grpo", 4, (*GROUPS, CACHE, "actor.rollout.layout=t2")),
    "ppo_70b": (
        "ppo",
        4,
        (
            *(*SMALL, CACHE, "actor.rollout.layout=t2", "critic.update.mini_batch_size=8"),
            *(f"{role}.engine.layout=t2p2" for role in ROLES),
            "reward.model.path=judge",
        ),
    ),
}
"""Recipe -> its script, number of ranks, what is scaled down."""


def write_models(folder: Path) -> None:
    """A model, a reward model of the same sizes, and two mixtures of experts; tokens are bytes."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = {word: number for number, word in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    plain = tokenizers.Tokenizer(tokenizers.models.BPE(words, []))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.chat_template = "{% for each in messages %}{{ each['content'] }}\n{% endfor %}"
    sizes = {"vocab_size": 320, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = write_llama(folder / "model", **sizes, tie_word_embeddings=False)
    config = transformers.AutoConfig.from_pretrained(model, num_labels=1)
    torch.manual_seed(1)
    judge = transformers.AutoModelForSequenceClassification.from_config(config)
    judge.save_pretrained(folder / "judge")
    save_tiny_model("qwen3_moe", folder / "mixture")
    save_tiny_model("gpt_oss", folder / "with_sinks")
    for name in ("model", "judge", "mixture", "with_sinks"):
        tokenizer.save_pretrained(folder / name)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_recipe_makes_a_step_with_a_tiny_model(
    simulated: Simulated, tmp_path: Path, name: str
) -> None:
    script, num_ranks, scaled = RECIPES[name]
    for package in ("vllm", "megatron"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    write_models(tmp_path)
    rows = [
        {"prompt": f"{n} + {n}?", "question": f"{n} + {n}?", "answer": f"so #### {2 * n}"}
        for n in range(10, 42)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    has_experts = MIXTURE[0] in scaled
    mixture = "with_sinks" if "gpt_oss" in name else "mixture"
    paths = {"actor.model.path": mixture if has_experts else "model"}
    paths |= {"data.train_path": "rows.jsonl"}
    paths |= {"data.eval_path": "rows.jsonl", "run.dir": "run"}
    words = [f"{key}={tmp_path / path}" for key, path in paths.items()]
    words += [word.replace("=judge", f"={tmp_path / 'judge'}") for word in scaled]
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}")
    files = (ROOT / "algos" / f"{script}.py", ROOT / "algos" / f"{name}.yaml")

    simulated(*torchrun, "-m", "spmdflow.run", *files, *words)

    run = tmp_path / "run"
    cfg = yaml.safe_load((run / "config.yaml").read_text())
    assert cfg["actor"]["rollout"]["engine"] == ("builtin" if has_experts else "vllm")
    assert cfg["actor"]["model"]["dtype"] == "bfloat16"
    *_, step = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(math.isfinite(value) for value in step.values())
    assert step["actor/optimizer_steps"] >= 1 and step["rollout/drift"] < 0.05
    assert list((run / "checkpoints").glob("*/actor/hugging_face/config.json"))
