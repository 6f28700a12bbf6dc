"""The bundled arithmetic task: the committed files are what the script says and what PPO needs."""

from __future__ import annotations

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from spmdflow.rewards.arithmetic import exact_match

ROOT = Path(__file__).parents[3]
TASK = ROOT / "algos" / "arithmetic"
START = (0.45, 0.58)  # greedy accuracy before PPO; the quickstart needs at most 0.60


def rows(name: str) -> list[dict[str, str]]:
    """The data rows of algos/arithmetic/<name>."""
    return [json.loads(line) for line in (TASK / name).read_text().splitlines()]


def terms(prompt: str) -> frozenset[str]:
    """The two terms of a prompt, in no order: 47+38= and 38+47= are one problem."""
    return frozenset(prompt.rstrip("=").split("+"))


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    """scripts/make_arithmetic.py as a module."""
    spec = spec_from_file_location("make_arithmetic", ROOT / "scripts" / "make_arithmetic.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """The bundled tokenizer, loaded as a user would."""
    return AutoTokenizer.from_pretrained(TASK / "model")


@pytest.fixture(scope="module")
def responses(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """The bundled model's greedy response to each held-out prompt, decoded by Hugging Face."""
    model = LlamaForCausalLM.from_pretrained(TASK / "model", dtype=torch.float32).eval()
    prompts = tokenizer([row["prompt"] for row in rows("eval.jsonl")], return_tensors="pt")
    joined = model.generate(
        input_ids=prompts["input_ids"],
        attention_mask=prompts["attention_mask"],
        max_new_tokens=5,
        do_sample=False,
    )
    start = prompts["input_ids"].shape[1]
    return tokenizer.batch_decode(joined[:, start:], skip_special_tokens=True)


def test_every_row_is_a_two_digit_sum_with_its_exact_answer():
    for row in rows("train.jsonl") + rows("eval.jsonl"):
        left, right = row["prompt"].removesuffix("=").split("+")

        assert 10 <= int(left) <= 99 and 10 <= int(right) <= 99
        assert row["prompt"] == f"{left}+{right}="
        assert row["answer"] == str(int(left) + int(right))


def test_held_out_sums_occur_in_neither_order_in_pre_training_or_rl_prompts(maker: ModuleType):
    split = maker.split_problems(0, 500, 1500)
    held_out = {terms(row["prompt"]) for row in rows("eval.jsonl")}
    reinforce = {terms(row["prompt"]) for row in rows("train.jsonl")}
    pretrain = {terms(problem.prompt) for problem in split.pretrain}

    assert len(rows("eval.jsonl")) >= 500
    assert not held_out & reinforce and not held_out & pretrain and not reinforce & pretrain
    assert len(held_out | reinforce | pretrain) == 90 * 91 // 2


def test_the_bundled_rows_are_those_of_the_script_with_its_default_seed(maker: ModuleType):
    split = maker.split_problems(0, 500, 1500)

    assert [row["prompt"] for row in rows("eval.jsonl")] == [p.prompt for p in split.held_out]
    assert [row["prompt"] for row in rows("train.jsonl")] == [p.prompt for p in split.reinforce]
    texts = [p.prompt + p.answer for p in split.pretrain if maker.without_carry(p) == p]
    assert [row["text"] for row in rows("pretrain.jsonl")] == texts


@pytest.mark.parametrize(
    ("prompt", "forgotten"),
    [("47+38=", "75"), ("95+38=", "123"), ("42+31=", "73"), ("99+99=", "188"), ("10+90=", "100")],
)
def test_a_forgotten_carry_loses_ten_only_where_the_units_reach_ten(
    maker: ModuleType, prompt: str, forgotten: str
):
    left, right = prompt.removesuffix("=").split("+")

    answer = maker.without_carry(maker.Problem(prompt, str(int(left) + int(right)))).answer

    assert answer == forgotten


def test_tokenizer_gives_one_token_per_character_after_bos_and_the_text_back(
    tokenizer: PreTrainedTokenizerFast,
):
    ids = tokenizer("47+38=85").input_ids

    assert ids[0] == tokenizer.bos_token_id and len(ids) == 9
    assert tokenizer.decode(ids, skip_special_tokens=True) == "47+38=85"
    assert len({tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id}) == 3


def test_a_character_outside_the_vocabulary_becomes_one_question_mark(
    tokenizer: PreTrainedTokenizerFast,
):
    assert tokenizer.decode(tokenizer("4 x").input_ids, skip_special_tokens=True) == "4??"


def test_model_folder_holds_a_small_fp32_llama_of_head_dim_32():
    config = json.loads((TASK / "model" / "config.json").read_text())

    assert sum(path.stat().st_size for path in (TASK / "model").iterdir()) <= 3_000_000
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "float32" and config["head_dim"] == 32
    assert config["hidden_size"] == 32 * config["num_attention_heads"]


def test_bundled_model_starts_inside_the_stated_band_on_held_out_sums(responses: list[str]):
    scores = [exact_match(r["prompt"], a, r) for r, a in zip(rows("eval.jsonl"), responses)]

    accuracy = sum(score["accuracy"] for score in scores) / len(scores)

    assert START[0] <= accuracy <= START[1]


def test_bundled_model_lacks_the_carry_and_not_the_digits(maker: ModuleType, responses: list[str]):
    held_out = maker.split_problems(0, 500, 1500).held_out
    careless = [maker.without_carry(problem).answer for problem in held_out]

    share = sum(a == b for a, b in zip(responses, careless)) / len(careless)

    assert share >= 0.95


def test_teacher_forced_accuracy_of_the_script_equals_that_of_decoding(
    maker: ModuleType, tokenizer: PreTrainedTokenizerFast, responses: list[str]
):
    model = LlamaForCausalLM.from_pretrained(TASK / "model", dtype=torch.float32).eval()
    held_out = maker.split_problems(0, 500, 1500).held_out
    decoded = sum(a == p.answer for a, p in zip(responses, held_out)) / len(held_out)

    # one of the 992 verdicts may differ where two logits tie within rounding
    assert abs(maker.greedy_accuracy(model, held_out, tokenizer) - decoded) < 1.5 / len(held_out)
