"""All cases: algorithms on FSDP and Megatron; GRPO on every engine and layout with every generator.

Three steps each: the first one also allocates and chooses, so the seconds are those of the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from scripts.matrix.case import MODEL, Case

SHORT = (
    "total_steps=3",
    "eval_every=0",
    "save_every=0",
    "run.save_last=false",
    "run.sample_every=0",
)
SUMS = (
    "data.train_path=problems/sums.train.jsonl",
    "data.eval_path=problems/sums.test.jsonl",
    "data.prompt_column=prompt",
    "data.chat_template=true",
    "data.max_prompt_tokens=64",
    "actor.rollout.max_new_tokens=16",
    "actor.rollout.max_batch_size=256",
)
NUMBER = ("reward.function=spmdflow.rewards.gsm8k:score",)


def _engine(role: str, engine: str, layout: str) -> list[str]:
    """Settings of one role's engine; layout "": the engine's own.

    A pipeline needs several micro-batches in each update.
    """
    settings = [
        f"{role}.engine.kind={engine}",
        f"{role}.engine.micro_batch_rows=null",
        f"{role}.engine.micro_batch_tokens={512 if engine == 'megatron' else 4096}",
    ]
    if layout:
        settings.append(f"{role}.engine.layout={layout}")
    return settings


def _batch(role: str, prompts: int, samples: int = 0, *, mini: int) -> list[str]:
    """Sizes of a step. samples 0: the script has no such setting."""
    settings = [f"data.prompts_per_step={prompts}", f"{role}.update.mini_batch_size={mini}"]
    if samples:
        settings.append(f"data.samples_per_prompt={samples}")
    return settings


def _roles_with(engine: str, layout: str, roles: Sequence[str]) -> list[str]:
    settings = []
    for role in roles:
        settings += _engine(role, engine, layout)
    return settings


def _algorithm(
    name: str,
    script: str,
    settings: Sequence[str],
    roles: Sequence[str],
    *,
    yaml: str = "",
    engines: Sequence[str] = ("fsdp", "megatron"),
    num_ranks: int = 2,
) -> Iterator[Case]:
    """The same settings on FSDP and on two pipeline stages of Megatron, without the stated ones."""
    for engine in engines:
        layout = ""
        if engine == "megatron":
            layout = "p2"
        chosen = _roles_with(engine, layout, roles)
        yield Case(
            f"{name}-{engine}",
            "algorithms",
            script,
            (*SHORT, *settings, *chosen),
            num_ranks=num_ranks,
            yaml=yaml,
        )


def _actor(*more: str) -> tuple[str, ...]:
    return (f"actor.model.path={MODEL}", *more)


def _algorithms() -> Iterator[Case]:
    sampled = (*_actor(), *SUMS, *NUMBER)
    groups = _batch("actor", 8, 4, mini=32)
    yield from _algorithm("grpo", "grpo", [*sampled, *groups, "actor.loss.kl_coef=0"], ["actor"])
    with_kl = [*sampled, *groups, "actor.loss.kl_coef=0.04"]
    yield from _algorithm("grpo_kl", "grpo", with_kl, ["actor", "reference"])
    yield from _algorithm("rloo", "rloo", [*sampled, *groups], ["actor", "reference"])
    ppo = [*sampled, *_batch("actor", 32, mini=16), "critic.update.mini_batch_size=16"]
    yield from _algorithm("ppo", "ppo", ppo, ["actor", "critic", "reference"])
    teacher = [*sampled, *_batch("actor", 32, mini=16), f"teacher.model.path={MODEL}"]
    yield from _algorithm("distill", "distill", teacher, ["actor", "teacher"])
    lora = [*sampled, *groups, "actor.loss.kl_coef=0.04", "actor.model.lora.rank=16"]
    yield from _algorithm(
        "grpo_lora", "grpo", [*lora, "reference.shares=actor"], ["actor"], engines=("fsdp",)
    )
    agent = [*_actor(), *_batch("actor", 8, 4, mini=32)]
    yield from _algorithm(
        "grpo_agent", "grpo_agent", agent, ["actor"], yaml="grpo_agent_calculator"
    )
    asynchronous = [*sampled, *groups, "actor.loss.kl_coef=0", "placement=split"]
    yield from _algorithm(
        "grpo_async", "grpo_async", asynchronous, ["actor"], engines=("fsdp",), num_ranks=2
    )
    yield from _algorithm(
        "grpo_async", "grpo_async", asynchronous, ["actor"], engines=("megatron",), num_ranks=4
    )
    yield from _algorithm("sft", "sft", _actor(), ["actor"], yaml="sft_dialogues")
    reward = [f"reward_model.model.path={MODEL}"]
    yield from _algorithm(
        "reward_model", "reward_model", reward, ["reward_model"], yaml="reward_model_dialogues"
    )
    yield from _algorithm("dpo", "dpo", _actor(), ["actor", "reference"], yaml="dpo_dialogues")


LAYOUTS = (
    ("fsdp", "", 2),
    ("zero1", "", 2),
    ("zero2", "", 2),
    ("zero3", "", 2),
    ("megatron", "t3", 3),
    ("megatron", "p2", 2),
    ("megatron", "t3p2", 6),
)
"""Engine, engine.layout, ranks."""
GENERATORS = (("builtin", "t1"), ("vllm", "t1"), ("vllm", "t3"))
WEIGHTS = ("copy", "blocks", "flat")


def _grpo_everywhere() -> Iterator[Case]:
    """GRPO with 8 x 4 rows on every engine, layout, generator and way of weights."""
    sizes = (*_actor(), *SUMS, *NUMBER, *_batch("actor", 8, 4, mini=32), "actor.loss.kl_coef=0")
    for engine, layout, num_ranks in LAYOUTS:
        for generator, generation_layout in GENERATORS:
            for weights in WEIGHTS:
                names = [engine, layout, generator, generation_layout, weights]
                rollout = (
                    f"actor.rollout.engine={generator}",
                    f"actor.rollout.layout={generation_layout}",
                    f"actor.rollout.weights={weights}",
                )
                yield Case(
                    "-".join(filter(None, names)),
                    "engines",
                    "grpo",
                    (*SHORT, *sizes, *_engine("actor", engine, layout), *rollout),
                    num_ranks=num_ranks,
                )


def _placements() -> Iterator[Case]:
    """PPO on one pool, on two, and where the planner puts it."""
    sampled = (*_actor(), *SUMS, *NUMBER)
    ppo = [*sampled, *_batch("actor", 32, mini=16), "critic.update.mini_batch_size=16"]
    roles = _roles_with("fsdp", "", ["actor", "critic", "reference"])
    for placement in ("colocate", "split", "auto"):
        settings = (*SHORT, *ppo, *roles, f"placement={placement}")
        yield Case(f"ppo-{placement}", "placements", "ppo", settings, num_ranks=2)


def _checkpoints() -> Iterator[Case]:
    """Two steps, a third one on another layout, and the folder that is exported then."""
    sizes = (*_actor(), *SUMS, *NUMBER, *_batch("actor", 8, 4, mini=32), "actor.loss.kl_coef=0")
    common = ("eval_every=0", "run.sample_every=0", "actor.optimizer.schedule=constant", *sizes)
    saves = ("total_steps=2", "save_every=2", *common)
    yield Case("saved-fsdp", "checkpoints", "grpo", (*saves, *_engine("actor", "fsdp", "")))
    saves_on_t3 = (*saves, *_engine("actor", "megatron", "t3"))
    yield Case("saved-megatron-t3", "checkpoints", "grpo", saves_on_t3, num_ranks=3)
    goes_on = ("total_steps=3", "save_every=3", *common)
    yield Case(
        "fsdp-to-megatron-p2",
        "checkpoints",
        "grpo",
        (*goes_on, *_engine("actor", "megatron", "p2")),
        resumes="saved-fsdp",
        checks_export=True,
    )
    yield Case(
        "megatron-t3-to-zero1",
        "checkpoints",
        "grpo",
        (*goes_on, *_engine("actor", "zero1", "")),
        resumes="saved-megatron-t3",
        checks_export=True,
    )


CASES: tuple[Case, ...] = (
    *_algorithms(),
    *_placements(),
    *_checkpoints(),
    *_grpo_everywhere(),
)
