"""Roles of a script's own: on bases that bind an engine, and several of one kind set apart."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from spmdflow import ActorWorker, ConfigError, FSDPWorker, ThreeDParallelWorker, ZeROWorker
from spmdflow.config.check import check
from spmdflow.config.load import load
from spmdflow.config.location import to_yaml
from spmdflow.config.schema import ActorConfig, EngineConfig
from spmdflow.controller.script import run_flow
from spmdflow.parallel.layout import Layout
from spmdflow.workers.schedule import learning_rate
from tests.algos.runs import ROOT, SCRIPT, SMALL, finish, log_of, steps_of, torchrun
from tests.rollout_reference import LLAMA

OWN = ROOT / "tests" / "algos" / "programs" / "own_roles.py"
APART = OWN.with_name("set_apart.py")
JUDGES = OWN.with_name("two_judges.py")
MODEL = ROOT / "algos" / "arithmetic" / "model"
SETTINGS = ("total_steps=2", "eval_every=0", "critic.loss.clip_range=null")


def run(script: Path, run_dir: Path) -> list[dict[str, float]]:
    words = [*SMALL, *SETTINGS, f"run.dir={run_dir}"]
    loaded = load(script, SCRIPT.with_suffix(".yaml"), words)
    assert run_flow(loaded.script, loaded.cfg, inproc=True) == 0
    return steps_of(run_dir)


def test_own_critic_and_zero_actor_give_the_numbers_of_the_given_roles(tmp_path: Path) -> None:
    given = run(SCRIPT, tmp_path / "given")
    own = run(OWN, tmp_path / "own")

    assert len(own) == len(given) == 2
    for one, other in zip(given, own, strict=True):
        for name in ("critic/loss", "critic/grad_norm", "actor/pg_loss", "actor/grad_norm"):
            assert other[name] == pytest.approx(one[name], rel=1e-6), name
    assert own[1]["critic/loss"] != own[0]["critic/loss"]


def log_probs_of(row: int, seen: dict[str, Any], temperature: float) -> Tensor:
    """(R,) of the bundled model, by Hugging Face alone."""
    prompt = seen["prompts"][row]
    response = seen["responses"][row]
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(-1, response[:, None])[:, 0]


def test_second_actor_reference_and_reward_have_the_settings_of_their_own_sections(
    tmp_path: Path,
) -> None:
    mirrored = tmp_path / "mirrored"  # the bundled tokenizer with 0 to 9 in the other order
    shutil.copytree(MODEL, mirrored, ignore=shutil.ignore_patterns("*.safetensors"))
    tree = json.loads((mirrored / "tokenizer.json").read_text())
    vocabulary = tree["model"]["vocab"]
    digits = {str(digit): vocabulary[str(9 - digit)] for digit in range(10)}
    tree["model"]["vocab"] = vocabulary | digits
    (mirrored / "tokenizer.json").write_text(json.dumps(tree))
    words = [
        *(
            *SMALL,
            "total_steps=1",
            "eval_every=0",
            "save_every=0",
            "run.save_last=false",
            "advantage.kl_coef=0",
        ),
        *("actor.loss.kl_coef=0", f"run.dir={tmp_path / 'run'}", "actor.rollout.temperature=0.8"),
        *("actor.optimizer.schedule=linear", "data.prompts_per_step=16"),
        *("lessons.train_path=${data.train_path}", "lessons.prompts_per_step=6"),
        *("lessons.samples_per_prompt=2", f"lessons.tokenizer_path={mirrored}"),
        *("lessons.max_prompt_tokens=8", "student.model.path=${actor.model.path}"),
        *("student.rollout.temperature=1.5", "student.rollout.max_new_tokens=4"),
        *("student.update.mini_batch_size=4", "student.optimizer.schedule=linear"),
        *("teacher.temperature=0.5", f"judge.tokenizer_path={mirrored}"),
        "judge.function=${reward.function}",
    ]
    loaded = load(APART, SCRIPT.with_suffix(".yaml"), words)
    loaded.script.SEEN.clear()

    assert run_flow(loaded.script, loaded.cfg, inproc=True) == 0

    first, second = loaded.script.SEEN
    assert (len(first["prompts"]), len(second["prompts"])) == (16, 12)
    cfg = loaded.cfg
    plain, other = (AutoTokenizer.from_pretrained(folder) for folder in (MODEL, mirrored))
    temperatures = ((first, 0.8, 0.8, plain), (second, 1.5, 0.5, other))
    for seen, policy, frozen, tokenizer in temperatures:
        for row in range(3):
            for column, value in (("old_log_probs", policy), ("ref_log_probs", frozen)):
                torch.testing.assert_close(
                    seen[column][row], log_probs_of(row, seen, value), rtol=1e-4, atol=1e-4
                )
        texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in seen["responses"]]
        assert seen["response_text"] == texts
        assert any("5" in text for text in texts)  # a stop string ends a response, and stays in it
        assert all("5" not in text[:-1] for text in texts)
    for seen, part, steps in ((first, cfg.actor, 16 // 8), (second, cfg.student, 12 // 4)):
        rates = [learning_rate(part.optimizer, number, steps) for number in range(steps)]
        assert seen["update"]["actor/lr"] == pytest.approx(sum(rates) / steps)  # a step's mean


def write_judge(folder: Path, words: str, merges: list[tuple[str, str]], *, seed: int) -> Path:
    """A random reward model and its tokenizer: characters and merges, between <s> and </s> if any
    are merged."""
    vocabulary = [*("<unk>", "<s>", "</s>"), *words, *map("".join, merges)]
    ids = {word: number for number, word in enumerate(vocabulary)}
    plain = tokenizers.Tokenizer(tokenizers.models.BPE(ids, merges, unk_token="<unk>"))
    plain.add_special_tokens(vocabulary[:3])
    if merges:
        marks = [(word, ids[word]) for word in ("<s>", "</s>")]
        single = tokenizers.processors.TemplateProcessing("<s> $A </s>", special_tokens=marks)
        plain.post_processor = single
    ends = {"bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=plain, **ends).save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(**LLAMA | {"vocab_size": len(ids), "num_labels": 1})
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder


@torch.no_grad()
def judged(folder: Path, texts: list[str]) -> tuple[Tensor, list[int]]:
    """(B,) scores and token counts of texts, by transformers, one at a time."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    rows = [tokenizer(text, return_tensors="pt").input_ids for text in texts]
    return torch.cat([model(ids).logits[:, 0] for ids in rows]), [ids.numel() for ids in rows]


def test_two_reward_models_with_tokenizers_of_their_own_score_as_transformers_does(
    tmp_path: Path,
) -> None:
    pairs = [(a, b) for a in "0123456789" for b in "02468"]
    helpful = write_judge(tmp_path / "helpful", "=+9876543210", [], seed=1)
    harmless = write_judge(tmp_path / "harmless", "0123456789+=", pairs, seed=2)
    words = [
        *("total_steps=1", "eval_every=0", f"run.dir={tmp_path / 'run'}", "run.sample_every=0"),
        *(f"data.train_path={MODEL.parent / 'train.jsonl'}", "data.prompts_per_step=8"),
        *("data.samples_per_prompt=4", "data.max_prompt_tokens=8", f"actor.model.path={MODEL}"),
        *("actor.rollout.max_new_tokens=6", "actor.update.mini_batch_size=32"),
        *(f"helpful.model.path={helpful}", f"harmless.model.path={harmless}"),
        *("helpful.engine.micro_batch_rows=5", "harmless.engine.micro_batch_tokens=40"),
        *("harmless.function={danger: -0.5 * model}", "actor.loss.kl_coef=0"),
    ]
    loaded = load(JUDGES, None, words)
    check(loaded.cfg, 1)
    loaded.script.SEEN.clear()

    assert run_flow(loaded.script, loaded.cfg, inproc=True) == 0

    (seen,) = loaded.script.SEEN
    actor = AutoTokenizer.from_pretrained(MODEL)
    rows = zip(seen["prompts"], seen["responses"], strict=True)
    texts = [actor.decode(torch.cat(pair), skip_special_tokens=True) for pair in rows]
    first, by_character = judged(helpful, texts)
    second, by_pair = judged(harmless, texts)
    # 1e-5: float32 sums in another order
    torch.testing.assert_close(seen["helpful"], first, rtol=0, atol=1e-5)
    torch.testing.assert_close(seen["harmless"], -0.5 * second, rtol=0, atol=1e-5)
    torch.testing.assert_close(seen["scores"], first - 0.5 * second, rtol=0, atol=1e-5)
    for row, score in zip(seen["token_level_rewards"], seen["scores"], strict=True):
        assert row[-1] == score and not row[:-1].any()
    assert len(set(by_pair)) > 1 and first.std() > 0.01 and second.std() > 0.01
    # pairs are merged, beside <s> and </s>
    assert any(one > other - 2 for one, other in zip(by_character, by_pair, strict=True))


def test_role_has_the_values_it_shares_in_its_own_section_and_the_file_has_them_once() -> None:
    words = ["actor.rollout.temperature=0.7", "data.prompts_per_step=6"]
    loaded = load(SCRIPT, None, [*words, "data.samples_per_prompt=4"])
    cfg = loaded.cfg

    assert cfg.reference.temperature == 0.7
    assert cfg.reward.tokenizer_path == cfg.actor.rollout.tokenizer_path == cfg.data.tokenizer_path
    assert cfg.actor.update.samples_per_step == cfg.critic.update.samples_per_step == 24
    text = to_yaml(cfg)
    assert "samples_per_step" not in text and text.count("tokenizer_path") == 1
    with pytest.raises(ConfigError, match="unknown key reference.temperature"):
        load(SCRIPT, None, ["reference.temperature=0.5"])


@pytest.mark.slow
def test_zero_stages_from_settings_alone_give_the_numbers_of_fsdp(tmp_path: Path) -> None:
    given = run(SCRIPT, tmp_path / "given")
    run_dir = tmp_path / "run"
    kinds = ("actor.engine.kind=zero1", "critic.engine.kind=zero2", "reference.engine.kind=zero1")

    status = finish(torchrun(run_dir, *SETTINGS, *kinds, num_ranks=2))

    assert status == 0, log_of(run_dir).read_text()[-3000:]
    for one, other in zip(given, steps_of(run_dir), strict=True):
        for name in ("critic/loss", "critic/grad_norm", "actor/pg_loss", "actor/grad_norm"):
            # float32 sums in another order
            assert other[name] == pytest.approx(one[name], rel=2e-5, abs=1e-6), name


@pytest.mark.parametrize(
    ("base", "kind", "bound"),
    [
        (FSDPWorker, "fsdp", "fsdp"),
        (ZeROWorker, "fsdp", "zero3"),
        (ZeROWorker, "zero1", "zero1"),
        (ThreeDParallelWorker, "fsdp", "megatron"),
    ],
)
def test_base_class_binds_its_engine_where_the_settings_leave_the_default(
    base: type, kind: str, bound: str
) -> None:
    role = type("Role", (base, ActorWorker), {})
    cfg = replace(ActorConfig(), engine=EngineConfig(kind=kind, micro_batch_rows=3))

    made = role.bind_engine(cfg).engine

    assert (made.kind, made.micro_batch_rows) == (bound, 3)
    assert role.bind_engine(cfg).rollout is cfg.rollout


def test_engine_of_another_base_class_is_refused_with_both_names() -> None:
    cfg = replace(ActorConfig(), engine=EngineConfig(kind="zero2"))

    with pytest.raises(ConfigError, match=r"got zero2, but FSDPWorker is bound to fsdp; remove it"):
        FSDPWorker.bind_engine(cfg)


def test_zero_needs_the_group_of_its_pool_and_none_of_one_rank() -> None:
    layout = Layout.data_parallel((2, 5))

    for kind in ("zero1", "zero2", "zero3"):
        settings = replace(ActorConfig(), engine=EngineConfig(kind))
        assert ZeROWorker.needed_groups(settings, layout) == [(2, 5)]
