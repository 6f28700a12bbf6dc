"""Rows of 131,072 tokens: read, generated, sent, trained by two ranks together, and logged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.algos.runs import ROOT, check_prediction, run_ranks, steps_of

pytestmark = pytest.mark.slow

BUNDLED = ROOT / "algos" / "arithmetic" / "model"
LENGTH = 131_072
NEW_TOKENS = 8


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """GRPO with two samples of one prompt: a model of one narrow layer, characters as tokens."""
    folder = tmp_path_factory.mktemp("long")
    model = folder / "model"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=LENGTH,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED / name, model / name)
    sums = "+".join(str(10 + number % 90) for number in range(LENGTH))
    prompt = sums[: LENGTH - NEW_TOKENS - 2] + "="
    data = folder / "prompts.jsonl"
    data.write_text(json.dumps({"prompt": prompt, "answer": "1"}) + "\n")
    return (
        f"actor.model.path={model}",
        f"data.train_path={data}",
        "data.eval_path=null",
        f"data.max_prompt_tokens={LENGTH - NEW_TOKENS}",
        "data.prompts_per_step=1",
        "data.samples_per_prompt=2",
        f"actor.rollout.max_new_tokens={NEW_TOKENS}",
        "actor.update.mini_batch_size=2",
        "actor.engine.micro_batch_rows=null",
        f"actor.engine.micro_batch_tokens={LENGTH}",
        "reference.engine.micro_batch_rows=null",
        f"reference.engine.micro_batch_tokens={LENGTH}",
        "reward.function=spmdflow.rewards.control:random_score",  # samples differ, so they teach
        "actor.optimizer.schedule=constant",
        "actor.optimizer.warmup_steps=0",
        "eval_every=0",
        "save_every=0",
        "run.save_last=false",
        "total_steps=1",
    )


def test_two_ranks_train_on_a_row_of_128k_tokens_as_each_does_on_whole_rows(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    divided = tmp_path / "divided"
    c2 = ("actor.engine.layout=c2", "reference.engine.layout=c2")
    ring = ("actor.engine.context_attention=ring", "reference.engine.context_attention=ring")
    script = ROOT / "algos" / "grpo.py"

    run_ranks(divided, *words, *c2, *ring, num_ranks=2, script=script, small=())
    run_ranks(tmp_path / "whole", *words, num_ranks=2, script=script, small=())

    check_prediction(divided)
    (step,) = steps_of(divided)
    (whole,) = steps_of(tmp_path / "whole")
    assert step["actor/grad_norm"] == pytest.approx(whole["actor/grad_norm"], rel=1e-4)
    assert step["actor/grad_norm"] > 0 and step["controller/tensor_bytes"] == 0
    assert step["actor/context_bytes"] > LENGTH * 4
    (sample, _) = (divided / "samples.jsonl").read_text().splitlines()
    assert len(sample) < LENGTH / 2, "a sample is written without its middle"
