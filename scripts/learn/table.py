"""The learning runs: name, script, settings beside the script's YAML, seeds, metric, target.

Tuned on training rewards with seeds that are not in this table; see docs/LEARNING.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from scripts.learn.entry import CALCULATOR, MIXTURE, Entry
from scripts.matrix.case import MODEL

BUNDLED = ("total_steps=20", "eval_every=2", "save_every=10", "actor.rollout.max_batch_size=1024")


def _bundled(name: str, *more: str, script: str = "", seeds: tuple[int, ...] = (0, 1, 2)) -> Entry:
    """Two-digit sums, 20 steps of 1,024 samples; greedy exact match on 992 held-out problems."""
    return Entry(
        name,
        "bundled",
        script or name,
        settings=(*BUNDLED, *more),
        seeds=seeds,
        target=0.9,
        more_metrics=("reward/mean",),
    )


BUNDLED_ENTRIES = (
    _bundled("ppo"),
    _bundled("grpo"),
    _bundled("rloo"),
    _bundled("remax"),
    _bundled("reinforce_pp"),
    _bundled("dapo"),
    _bundled(
        "reinforce_pp_baseline",
        "advantage.estimator=reinforce_pp_baseline",
        "data.prompts_per_step=128",
        "data.samples_per_prompt=8",
        "advantage.kl_coef=0",
        "actor.loss.kl_coef=0.04",
        "actor.loss.kl_estimator=k2",
        script="reinforce_pp",
        seeds=(0,),
    ),
    _bundled(
        "dr_grpo",
        "advantage.estimator=dr_grpo",
        "actor.loss.aggregation=sequence-mean-token-sum-by-budget",
        script="grpo",
        seeds=(0,),
    ),
    _bundled(
        "gspo",
        "actor.loss.surrogate=gspo",
        "actor.loss.clip_ratio=3e-3",
        "actor.loss.clip_ratio_high=4e-3",
        script="grpo",
        seeds=(0,),
    ),
    _bundled(
        "grpo_lora",
        "actor.model.lora.rank=16",
        "actor.optimizer.lr=2e-3",
        "reference.shares=actor",
        script="grpo",
    ),
)

MIXTURE_MODEL = f"{MIXTURE}/model"
MIXTURE_ENTRIES = (
    replace(
        _bundled(
            "grpo_mixture",
            f"actor.model.path={MIXTURE_MODEL}",
            f"reference.model.path={MIXTURE_MODEL}",
            "actor.update.router=replay",
            "actor.update.router_balance_coef=0.02",
            script="grpo",
        ),
        group="mixture",
        drawn=(("actor/expert_load_min", 0.25),),
        more_metrics=(
            "reward/mean",
            "actor/expert_load_max",
            "actor/router_entropy",
            "actor/router_balance",
        ),
    ),
)
"""Eight experts, two for each token; none may fall below a quarter of an equal share."""

STORIES = ("run.keep_checkpoints=1", "run.sample_every=4", "eval_every=4", "save_every=4")


def _stories(name: str, *more: str, steps: int = 20) -> Entry:
    """Cheerful stories, steps of 128 samples; greedy reward on prompts.test, 200 openings."""
    return Entry(
        f"stories_{name}",
        "stories",
        name,
        settings=(*STORIES, f"total_steps={steps}", *more),
        seeds=(0,),
        metric="eval/mean",
        target=2.5,
        more_metrics=("reward/mean", "actor/reference_kl_per_response", "actor/entropy"),
        yaml="grpo_stories",
        judged=True,
    )


ONE_SAMPLE = ("data.prompts_per_step=128", "data.samples_per_prompt=1")
REFERENCE = ("reference.engine.micro_batch_rows=64",)
STORIES_ENTRIES = (
    _stories("grpo", *REFERENCE, "actor.loss.kl_coef=0.04", "advantage.kl_coef=0", steps=12),
    _stories("rloo", *REFERENCE),
    _stories("remax", *REFERENCE, *ONE_SAMPLE),
    _stories("reinforce_pp", *REFERENCE, *ONE_SAMPLE),
    # every response is cut at 64 tokens: a penalty of length would teach to end, not to cheer
    _stories("dapo", "advantage.kl_coef=0", "overlong.weight=0"),
)

HARMLESS = (
    "data.train_path=runs/story_pairs/harmless.train.jsonl",
    "data.eval_path=runs/story_pairs/harmless.test.jsonl",
    "data.max_prompt_tokens=400",
    "data.prompts_per_step=32",
    "reward_model.update.mini_batch_size=32",
    "reward_model.engine.micro_batch_rows=16",
    "reward_model.optimizer.lr=5e-4",
    "total_steps=20",
    "eval_every=10",
)

# The cost is a stated rule: 1 if the response holds the digit 7, else 0.
CONSTRAINED_ENTRIES = (
    Entry(
        "safe_rlhf",
        "constrained",
        "safe_rlhf",
        settings=("actor.rollout.max_batch_size=1024",),
        metric="reward/mean",
        drawn=(("cost/mean", 0.1), ("multiplier", None)),
        more_metrics=("reward/accuracy", "eval/accuracy", "actor/pretrain_loss"),
    ),
)

# Without generation; judged on rows that they were not trained on.
OFFLINE_ENTRIES = (
    Entry(
        "sft_stories",
        "offline",
        "sft",
        seeds=(0,),
        metric="eval/loss",
        more_metrics=("actor/loss",),
        yaml="sft_stories",
    ),
    Entry(
        "reward_model_stories",
        "offline",
        "reward_model",
        seeds=(0,),
        metric="eval/accuracy",
        target=0.78,
        more_metrics=("eval/loss", "eval/margin", "reward_model/loss"),
        yaml="reward_model_stories",
    ),
    Entry(
        "reward_model_harmless",
        "offline",
        "reward_model",
        settings=HARMLESS,
        seeds=(0,),
        metric="eval/accuracy",
        more_metrics=("eval/loss", "reward_model/loss"),
        yaml="reward_model_stories",
    ),
    Entry(
        "dpo",
        "offline",
        "dpo",
        settings=("total_steps=20", "eval_every=5", "save_every=10"),
        metric="eval/margin",
        more_metrics=("eval/accuracy", "eval/loss", "actor/loss"),
    ),
)

CONTROL = ("total_steps=10", "eval_every=5")
WITHOUT_PENALTY = ("overlong.weight=0",)
"""Of length, which a random score would leave as the only thing to learn."""


def _real(
    name: str,
    problems: str,
    *more: str,
    seeds: tuple[int, ...] = (1,),
    yaml: str = "dapo_sums",
    metric: str = "eval/accuracy",
    target: float | None = None,
    reward: str = "",
) -> Iterator[Entry]:
    """A task by chat with a real model of 134.5 million parameters; greedy, held-out problems.

    With the same for 10 steps and a random reward, which must teach nothing.
    problems: of scripts/make_problems.py, whose files have the name of the task.
    reward: function that measures the control, if it is not that of sums.
    """
    random = "reward.function=spmdflow.rewards.control:random_score"
    if reward:
        random += f"(function='{reward}')"
    words = problems.split()
    task = words[words.index("--task") + 1] if "--task" in words else words[0]
    learned = Entry(
        f"real_{name}",
        "real_model",
        yaml.partition("_")[0],
        settings=(
            f"actor.model.path={MODEL}",
            f"data.train_path=problems/{task}.train.jsonl",
            f"data.eval_path=problems/{task}.test.jsonl",
            "run.keep_checkpoints=1",
            *more,
        ),
        seeds=seeds,
        metric=metric,
        target=target,
        more_metrics=("reward/mean", "actor/entropy", "rollout/response_length", "eval/mean"),
        yaml=yaml,
        problems=tuple(words),
        num_ranks=2,
    )
    yield learned
    control = replace(
        learned, name=f"real_{name}_control", seeds=(1,), metric="eval/accuracy", target=None
    )
    penalty = WITHOUT_PENALTY if learned.script == "dapo" else ()
    yield control.with_settings((random, *CONTROL, *penalty))


def _reasoning(
    task: str, settings: str = "{}", *, steps: int = 30, metric: str = "eval/accuracy"
) -> Iterator[Entry]:
    """A task of reasoning-gym, whose score starts between 5 and 40 %."""
    return _real(
        task,
        f"reasoning problems --task {task} --settings {settings}",
        "reward.function=spmdflow.rewards.reasoning:score",
        *("data.max_prompt_tokens=320", "data.eval_prompts=200", "overlong.weight=0"),
        *("actor.rollout.max_new_tokens=40", f"total_steps={steps}", f"save_every={steps}"),
        f"eval_every={steps // 3}",
        metric=metric,
        reward="spmdflow.rewards.reasoning:score",
    )


REAL_MODEL_ENTRIES = (
    *_real("sums", "sums problems", seeds=(1, 2, 3), target=0.9),
    *_real("differences", "differences problems", "total_steps=40", "eval_every=10"),
    *_real(
        "instructions",
        "instructions problems",
        yaml="dapo_instructions",
        metric="eval/mean",
        reward="spmdflow.rewards.instructions:weighted_sum",
    ),
    # solved after 13 steps: then too few prompts have samples that differ
    *_reasoning("string_insertion", '{"min_string_length":5,"max_string_length":7}', steps=12),
    *_reasoning("knights_knaves", metric="eval/mean"),
    *_real(
        "gsm8k",
        "gsm8k $SPMDFLOW_DATA/gsm8k problems",
        *("data.prompts_per_step=16", "data.eval_prompts=200", "data.max_prompt_tokens=320"),
        *("actor.rollout.max_new_tokens=128", "actor.update.mini_batch_size=64"),
        *("actor.engine.kind=zero1", "actor.engine.micro_batch_tokens=4096"),
        *("actor.optimizer.lr=1e-5", "actor.optimizer.warmup_steps=2", "actor.loss.kl_coef=0"),
        *("total_steps=20", "eval_every=10", "save_every=20"),
        yaml="grpo_gsm8k",
    ),
)

GAMES_ENTRIES = (
    Entry(
        "race",
        "games",
        "grpo_agent",
        settings=("eval_every=10",),
        metric="eval/first_side",
        target=0.5,
        drawn=(("eval/second_side", None),),
        yaml="grpo_agent_race",
    ),
)

CALCULATOR_ENTRY = Entry(
    "calculator_thoughts",
    "calculator",
    "grpo_agent",
    settings=(f"actor.model.path={CALCULATOR}/export/actor", "run.keep_checkpoints=1"),
    seeds=(0,),
    target=0.6,
    more_metrics=("reward/mean", "actor/entropy", "eval/used", "eval/thought"),
    yaml="grpo_agent_thoughts",
    num_ranks=2,
)
"""Starts from the SFT model, whose accuracy is the one of step 0."""

CALCULATOR_ENTRIES = (
    CALCULATOR_ENTRY,
    replace(CALCULATOR_ENTRY, name="calculator_control", target=None).with_settings(
        (
            "actor.rollout.episode.environment=algos/calculator/tool.py:episode_with_random_score",
            "total_steps=10",
        )
    ),
)

ENTRIES: tuple[Entry, ...] = (
    *BUNDLED_ENTRIES,
    *MIXTURE_ENTRIES,
    *STORIES_ENTRIES,
    *CONSTRAINED_ENTRIES,
    *OFFLINE_ENTRIES,
    *GAMES_ENTRIES,
    *CALCULATOR_ENTRIES,
    *REAL_MODEL_ENTRIES,
)
