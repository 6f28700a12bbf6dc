"""The settings of a run, as typed dataclasses: a default that works, a sentence, bounds.

A field without a default is required. A script may have a custom class, built from these
parts, in `main(flow: Flow, cfg: Mine)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from spmdflow.config.data_source import SOURCE_COLUMN
from spmdflow.config.guard import DEFAULT_GUARDS
from spmdflow.config.leaf import PARTS, follows, part, setting
from spmdflow.config.model import (
    AUTO,
    DTYPES,
    LoRAConfig,
    ModelConfig,
    PolicyModelConfig,
    Precise,
)
from spmdflow.config.objective import (
    AdvantageConfig,
    PolicyLossConfig,
    PolicyUpdateConfig,
    UpdateConfig,
    ValueLossConfig,
)
from spmdflow.kind.engine import (
    engine_names,
    engines_that_divide_experts,
    engines_that_divide_rows,
    engines_that_shard,
    option_names,
    options_doc,
)
from spmdflow.kind.generator import generator_names, generators_doc, generators_with_adapters
from spmdflow.kind.table import SERVER_DIALECTS, optimizers_doc

NO_LIMIT = 1 << 30
ALWAYS = "always"
CPU_CACHE_BYTES = 64 << 20


@dataclass
class RunConfig:
    """Where a run lives, its seed, its limits and what it shows."""

    name: str = setting("Name of the run; RUN_DIR is runs/<name> unless dir is set.", "ppo")
    dir: str | None = setting("RUN_DIR itself; overrides name.", None)
    seed: int = setting("Seed from which every random stream is derived.", 0, at_least=0)
    resume: str = setting(
        "auto: continue from the latest checkpoint; reload_frozen: also if a frozen model "
        "(reference, reward) is another one; afresh: also if its checkpoints are gone, at step 1; "
        "never: refuse a used RUN_DIR.",
        "auto",
        one_of=("auto", "never", "reload_frozen", "afresh"),
    )
    start_seconds: float = setting(
        "Limit for all ranks to meet and models to be built.", 600.0, above=0
    )
    call_seconds: float | None = setting(
        "Limit for one worker method, waits for rows not counted; null: 20 times the median of its "
        "earlier calls, at least 600 s, and an hour before there are three.",
        None,
        above=0,
    )
    transfer_seconds: float = setting(
        "Limit for one released transfer; a rank that is silent as long is warned of.",
        60.0,
        above=0,
    )
    save_last: bool = setting(
        "A run that ends well saves its last step, if it trained, also with save_every=0.", True
    )
    keep_checkpoints: int = setting("Newest checkpoints that are kept.", 2, at_least=1)
    keep_best: str | None = setting("Metric whose best checkpoint stays; -NAME: its lowest.", None)
    push_to_hub: str | None = setting("owner/name to push the finished run's models to.", None)
    max_seconds: float | None = setting("Limit of a launch; the run saves before.", None, above=0)
    trackers: list[str] = setting(
        "Besides metrics.jsonl: tensorboard, wandb, mlflow, trackio, swanlab or your own.", []
    )
    metrics_port: int | None = setting(
        "Port of the page for Prometheus that rank 0 serves, http://ADDRESS:PORT/metrics; 0: the "
        "system chooses one (RUN_DIR/metrics-url has it); null: no page.",
        None,
        at_least=0,
        at_most=65535,
    )
    metrics_address: str = setting(
        "IP address on which the page listens; 0.0.0.0: all of rank 0's node.", "127.0.0.1"
    )
    sample_every: int = setting("Steps between samples, also of step 1 (0: none).", 10, at_least=0)
    view: bool = setting("Write view.html at the end, a page to look at (spmdflow view).", False)
    profile_steps: list[int] = setting("Steps to record with torch.profiler.", [], at_least=1)
    profile_ranks: list[int] = setting("Ranks that record them.", [0], at_least=0)
    capture_step: int = setting("Step that is kept for spmdflow.replay (0: none).", 0, at_least=0)
    guards: list[str] = setting("Metrics that warn, stop or skip: NAME < 1: stop.", DEFAULT_GUARDS)
    hardware: str | None = setting(
        "Hardware that placement=auto and predictions count with: a100_80gb, h100, h200, cpu, or a "
        "file of scripts/calibrate.py; none: this node's kind.",
        None,
    )


MAX_TEXTS_PER_LINE = 1 << 12
"""Most answers of a conversation that is cut into rows."""

PLACEMENT_TYPE = "str or map of pool -> {roles, ranks}"
"""Type of a script's `placement` in words; its annotation is Any."""

CHAT_ARGUMENTS_DOC = (
    "Variables that the chat template reads, as in {enable_thinking: false} for Qwen3 or "
    "{date_string: 26 Jul 2024} for Llama 3.2; episodes use them too."
)
CHAT_DATE_DOC = (
    "Date that chat templates show as today's, such as 2026-11-28; auto: for templates that ask "
    "for it, the day of the run's first start."
)
TRUSTED_ROLES = ("system", "developer", "assistant")
TRUSTED_ROLES_DOC = (
    "Roles of chat messages whose special tokens count; in messages of other roles, the text of a "
    "special token stays text, in episodes too."
)
EVAL_PROMPTS_DOC = "An evaluation takes the first so many held-out prompts; null: all."
EVAL_SAMPLES_DOC = (
    "Responses that an evaluation samples for each prompt besides the greedy one, for pass@k and "
    "maj@n; 0: none."
)
TOOLS_DOC = (
    "Column with the tools that the chat template shows (a list of schemas, or its JSON); none: no "
    "tools."
)


class DataSettings:
    """What the code reads of a data section; subclasses make some of it settings."""

    train_path: Any = None
    eval_path: str | None = None
    prompt_column: str | None = None
    prompt_end: str = ""
    chat_template: bool = False
    # Any: the values are those of a template's variables
    chat_template_arguments: Mapping[str, Any] = MappingProxyType({})
    chat_template_date: str = AUTO
    trusted_roles: Sequence[str] = TRUSTED_ROLES
    tools_column: str | None = None
    rows_per_conversation: str = "one"
    tokenizer_path: str
    max_prompt_tokens: int
    prompts_per_step: int = 1
    samples_per_prompt: int = 1
    shuffle: bool = False
    max_bad_rows: int
    eval_prompts: int | None = None
    eval_samples: int = 0
    label_column: str | None = None

    kind: ClassVar[str] = "prompts"
    """Kind of rows without a label column: prompts, examples or pairs."""
    answers: ClassVar[tuple[str, ...]] = ()
    """Names of the settings that name answer columns, if rows have no label column."""

    @property
    def rows(self) -> str:
        """Kind of the rows: prompts; or examples, pairs, labels (`offline`), which hold answers."""
        if self.label_column is None:
            return self.kind
        return "labels"

    @property
    def answer_columns(self) -> tuple[str, ...]:
        """Columns with answers, the better one first; or the columns of answer and label."""
        labelled = ("completion_column", "label_column")
        names = self.answers if self.label_column is None else labelled
        return tuple(getattr(self, name) for name in names if getattr(self, name) is not None)

    @property
    def shown_source(self) -> tuple[str, Any]:
        """Name and value of the setting whose rows are shown: train_path, otherwise eval_path."""
        if self.train_path is None:
            return "eval_path", self.eval_path
        return "train_path", self.train_path

    @property
    def texts_per_line(self) -> int:
        """How many rows a line of a file may become: row number = line x this + index."""
        if self.rows_per_conversation == "answers":
            return MAX_TEXTS_PER_LINE
        return 1

    @property
    def samples_per_step(self) -> int:
        """Rows of one step's batch."""
        return self.prompts_per_step * self.samples_per_prompt


@dataclass
class DrawnDataConfig(DataSettings):
    """Rows that steps draw: files, columns, lengths and how many make a step."""

    # Any: a path, or a map of weighted ones; config/data_source.py reads it
    train_path: Any = setting(
        "File or data set of training prompts, or a weighted map of them.",
        type_words="str or map of name -> str",
    )
    tokenizer_path: str = setting("Folder of the tokenizer.", "${actor.model.path}")
    max_prompt_tokens: int = setting("Longer prompts are omitted and counted.", 512, at_least=1)
    prompts_per_step: int = setting("Prompts drawn for one step.", 64, at_least=1)
    shuffle: bool = setting("Reorder the prompts each epoch, derived from run.seed.", True)
    max_bad_rows: int = setting("Unreadable rows that do not end the run.", 0, at_least=0)


@dataclass
class AnswerDataConfig(DrawnDataConfig):
    """Rows that steps draw, and held-out rows for evaluation."""

    eval_path: str | None = setting(
        "File or data set of held-out prompts; none: no evaluation.", None
    )
    chat_template: bool = setting("Render prompts with the tokenizer's chat template.", False)
    chat_template_arguments: dict[str, Any] = setting(CHAT_ARGUMENTS_DOC, {})
    chat_template_date: str = setting(CHAT_DATE_DOC, AUTO)
    trusted_roles: list[str] = setting(TRUSTED_ROLES_DOC, list(TRUSTED_ROLES))
    tools_column: str | None = setting(TOOLS_DOC, None)
    eval_prompts: int | None = setting(EVAL_PROMPTS_DOC, None, at_least=1)
    eval_samples: int = setting(EVAL_SAMPLES_DOC, 0, at_least=0)


@dataclass
class DataConfig(AnswerDataConfig):
    """Prompts to generate from, and the number of samples of each."""

    prompt_column: str = setting("Column that holds the prompt (text, or chat messages).", "prompt")
    samples_per_prompt: int = setting("Responses generated for each prompt.", 1, at_least=1)


@dataclass
class EngineConfig:
    """How a model is distributed and cut into micro-batches."""

    kind: str = setting("Engine that runs the model.", engine_names()[0], one_of=engine_names)
    layout: str = setting(
        "Tensor- and pipeline-parallel sizes, such as t2p2; the other ranks are data-parallel "
        "(t2p2d4: four of them, which is checked). "
        "p4v2: two parts of the model on each of 4 stages (interleaved 1F1B). s8: "
        f"shard over groups of 8, replicate over the groups ({', '.join(engines_that_shard())}). "
        "e4: divide the experts of a mixture over 4 data-parallel ranks "
        f"({', '.join(engines_that_divide_experts())}). c2: 2 ranks divide the tokens of each row "
        f"({', '.join(engines_that_divide_rows())}).",
        "t1",
    )
    context_attention: str = setting(
        "Attention where ranks divide rows (c). ulysses: tokens are exchanged for heads; gather: a "
        "rank gathers all keys for its own queries; ring: keys pass from rank to rank; auto: "
        "ulysses if c divides the heads, otherwise ring.",
        "auto",
        one_of=("auto", "ulysses", "gather", "ring"),
    )
    options: list[str] = setting(
        f"What the engine does otherwise: {options_doc()}.",
        [],
        one_of=option_names,
    )
    offload: list[str] | None = setting(
        "What lives on the host between calls; []: nothing; null: what makes a step fit and "
        "fastest, by the plan (nothing on CPU).",
        None,
        one_of=PARTS,
    )
    micro_batch_tokens: int = setting(
        "Most tokens of one forward of a rank, or of the c ranks that divide rows; a longer row "
        "goes alone.",
        8192,
        at_least=1,
        resets="micro_batch_rows",
    )
    micro_batch_rows: int | None = setting(
        "Rows of one forward of a rank; null: micro_batch_tokens limits it instead.",
        None,
        at_least=1,
    )

    @property
    def offloaded_parts(self) -> tuple[str, ...]:
        """What is offloaded, in the order of `PARTS`; nothing before a plan has chosen it."""
        return tuple(part for part in PARTS if part in (self.offload or ()))

    @property
    def recompute(self) -> bool:
        """Recompute activations in backward (activation checkpointing)."""
        return "recompute" in self.options

    @property
    def micro_batch_size_per_rank(self) -> int:
        """Rows of one forward on one rank; NO_LIMIT if tokens limit it instead."""
        return self.micro_batch_rows or NO_LIMIT

    @property
    def max_micro_batch_tokens(self) -> int | None:
        """Tokens of one forward on one rank, if they limit it instead of rows."""
        if self.micro_batch_rows is not None:
            return None
        return self.micro_batch_tokens


@dataclass
class FrozenEngineConfig(EngineConfig):
    """How a model that is never trained is distributed: no options for its backward."""

    of_actor: list[str] | None = follows("actor.engine.options", None)
    # Not a setting: of the actor's options only padded applies to a forward.
    options: ClassVar[Any] = property(  # type: ignore[misc]
        lambda engine: [name for name in engine.of_actor or () if name == "padded"]
    )


@dataclass
class OptimizerConfig:
    """An optimizer with warm-up, schedule and clipping."""

    name: str = setting(optimizers_doc(), "AdamW")
    lr: float = setting("Peak learning rate.", 1e-5, above=0)
    betas: list[float] = setting("AdamW's two moment decays.", [0.9, 0.95], at_least=0, below=1)
    weight_decay: float = setting("Decoupled weight decay.", 0.0, at_least=0)
    decay_parameters: str = setting(
        "What weight decay applies to. all: every trained tensor, norms, biases and embeddings "
        "too; matrices: neither of these.",
        "all",
        one_of=("all", "matrices"),
    )
    clip_norm: float = setting("Global gradient norm is clipped to this.", 1.0, above=0)
    schedule: str = setting(
        "Learning rate after warm-up; linear and cosine end at zero.",
        "constant",
        one_of=("constant", "linear", "cosine"),
    )
    warmup_steps: int = setting("Optimizer steps of linear warm-up.", 0, at_least=0)
    total_steps: int = setting(
        "Optimizer steps after which the schedule has ended; 0: it ends with the last step of the "
        "run, however many optimizer steps that takes.",
        0,
        at_least=0,
    )
    skip_nonfinite: int = setting(
        "Optimizer steps in a row that are skipped because their gradient is not finite; one "
        "more ends the run.",
        0,
        at_least=0,
    )


@dataclass
class ServerConfig:
    """Generation servers (rollout.engine=served), and the limits of what a run waits for."""

    addresses: list[str] = setting(
        "Servers that run already, as http://host:port, started with spmdflow serve; empty: each "
        "rank that generates starts its own.",
        [],
    )
    dialect: str = setting(
        "Program of these servers; sglang draws with its own random numbers (sampler=server).",
        SERVER_DIALECTS[0],
        one_of=SERVER_DIALECTS,
    )
    key_file: str | None = setting("File with the key of servers that run already.", None)
    count: int = setting("Servers that each rank starts.", 1, at_least=1)
    host: str = setting(
        "Address on which these listen; one that the other ranks reach, if they are on several "
        "nodes.",
        "127.0.0.1",
    )
    devices: list[str] = setting(
        "Devices of each server that a rank starts, such as '0,1' for one on two GPUs; empty: the "
        "rank's own.",
        [],
    )
    tp_size: int = setting("Tensor-parallel size of a server that a rank starts.", 1, at_least=1)
    arguments: list[str] = setting(
        "Further arguments of vLLM's server, where a rank starts it.", []
    )
    exact: bool = setting(
        "Exact mode: a server computes one row at a time, and a weight sync waits for the rows "
        "under way, so a run gives the same bits whatever happens to servers. Needs "
        "max_batch_size=1.",
        False,
    )
    transport: str = setting(
        "How weights travel to servers: messages of torch.distributed (gloo), or one-sided writes "
        "(nixl).",
        "gloo",
        one_of=("gloo", "nixl"),
    )
    health_seconds: float = setting(
        "Time between two questions to a server whether it is well, and limit of its answer.",
        2.0,
        above=0,
    )
    stall_seconds: float = setting(
        "A row without a new token for so long goes to another server.", 30.0, above=0
    )
    transfer_seconds: float = setting(
        "Limit of each message of a weight sync to a server, and of its switch.", 10.0, above=0
    )
    wait_seconds: float = setting(
        "Longest time that a run waits without any server.", 3600.0, above=0
    )


@dataclass
class RolloutConfig(Precise):
    """Generation: which engine, how to sample, how the weights are checked."""

    engine: str = setting(
        f"{generators_doc()}; auto: the first of a package that is installed on CUDA, otherwise "
        f"{generator_names()[0]}.",
        AUTO,
        one_of=lambda: (AUTO, *generator_names()),
    )
    layout: str = setting(
        "Parallel sizes while generating, such as t2; t2e2: its ranks divide whole experts of a "
        "mixture; auto: the trainer's t, or t1 where ranks generate alone.",
        "auto",
    )
    weights: str = setting(
        "How weights get from trainer to generator; auto: blocks where they apply, or as planned. "
        "adapter: adapters alone, next to weights that stay, instead of merged "
        f"({', '.join(generators_with_adapters())}).",
        "auto",
        one_of=("auto", "copy", "blocks", "flat", "adapter"),
    )
    dtype: str = setting(
        "Precision of the generator's weights. auto: bfloat16 on CUDA, the actor's on CPU.",
        AUTO,
        one_of=DTYPES,
    )
    max_new_tokens: int = setting("Longest response.", 64, at_least=1)
    temperature: float = setting(
        "Sampling temperature; also divides the trainer's logits.", 1.0, above=0
    )
    top_p: float = setting("Nucleus sampling; 1 keeps every token.", 1.0, above=0, at_most=1)
    top_k: int = setting("Sample among the k likeliest tokens; 0 keeps every token.", 0, at_least=0)
    max_batch_size: int = setting("Rows decoded together on one rank.", 128, at_least=1)
    kv_cache_gib: float | None = setting(
        "Size of a vLLM engine's KV cache on each rank; null: kv_cache_fraction.", None, above=0
    )
    kv_cache_fraction: float | None = setting(
        "The same as a part of the memory that the plan leaves free while it generates; null: 0.9, "
        "at most for max_batch_size rows, and 64 MiB on CPU.",
        None,
        above=0,
        at_most=1,
        resets="kv_cache_gib",
    )
    verify_every: int = setting(
        "Weight syncs between checksum comparisons (0: never).", 1, at_least=0
    )
    sampler: str = setting(
        "Who draws tokens where servers generate. row: each row's own random numbers, the same on "
        "every server; server: also servers that cannot do that are used.",
        "row",
        one_of=("row", "server"),
    )
    server: ServerConfig = part(ServerConfig)
    tokenizer_path: str = follows("data.tokenizer_path", "")  # to find stop strings
    max_prompt_tokens: int = follows("data.max_prompt_tokens", 0)
    # Any: a dict; none if the script has no such setting
    chat_template_arguments: Any = follows("data.chat_template_arguments", None)  # for episodes
    chat_template_date: str = follows("data.chat_template_date", AUTO)  # for episodes
    trusted_roles: list[str] | None = follows("data.trusted_roles", None)  # for episodes
    lora: LoRAConfig | None = follows("actor.model.lora", None)  # for weights=adapter
    router: str = follows("actor.update.router", "own")

    @property
    def generator(self) -> str:
        """engine, or the built-in one while it is auto (before a run or a plan has chosen)."""
        if self.engine == AUTO:
            return generator_names()[0]
        return self.engine

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache; 64 MiB while a run or a plan has not chosen them."""
        if self.kv_cache_gib is None:
            return CPU_CACHE_BYTES
        return round(self.kv_cache_gib * (1 << 30))

    @property
    def longest_row(self) -> int | None:
        """Most tokens of prompt and response together; None: the model's context length."""
        if self.max_model_len is None and self.max_prompt_tokens:
            return self.max_prompt_tokens + self.max_new_tokens
        return self.max_model_len


@dataclass
class ActorConfig:
    """The policy: trains and generates."""

    model: PolicyModelConfig = part(PolicyModelConfig)
    engine: EngineConfig = part(EngineConfig)
    optimizer: OptimizerConfig = part(OptimizerConfig)
    update: PolicyUpdateConfig = part(PolicyUpdateConfig)
    rollout: RolloutConfig = part(RolloutConfig)
    loss: PolicyLossConfig = part(PolicyLossConfig)


@dataclass
class CriticConfig:
    """The value model. It starts from the reward model, or from the actor if there is none."""

    model: ModelConfig = part(ModelConfig, path="${first_of:reward.model.path,actor.model.path}")
    engine: EngineConfig = part(EngineConfig)
    optimizer: OptimizerConfig = part(OptimizerConfig)
    update: UpdateConfig = part(UpdateConfig)
    loss: ValueLossConfig = part(ValueLossConfig)


@dataclass
class ReferenceConfig:
    """The frozen policy that the KL is measured against; by default the actor's initial one."""

    shares: str | None = setting(
        "actor: no separate copy; it is the actor of the same ranks with its adapters off.",
        None,
        one_of=("actor",),
    )
    model: ModelConfig = part(ModelConfig, path="${actor.model.path}")
    engine: FrozenEngineConfig = part(FrozenEngineConfig)
    compute: str = setting(
        "auto: only if a setting or the script reads its log-probs, and not built before that; "
        "always: also if only the metric actor/reference_kl needs them.",
        AUTO,
        one_of=(AUTO, ALWAYS),
    )
    temperature: float = follows("actor.rollout.temperature", 1.0)  # divides the logits


MAX_FAILED_DOC = (
    "With on_error=drop, the run ends if a larger fraction of the rows of one call fails."
)


@dataclass
class RewardConfig:
    """Scores: a model, functions in worker processes, or a weighted sum of both."""

    model: ModelConfig | None = setting("A classifier with one label; or use function.", None)
    engine: FrozenEngineConfig = part(FrozenEngineConfig)
    per_token: bool = setting("The model scores each response token, not the whole.", False)
    # Any: a name, or a map of terms; config/reward.py reads it
    function: Any = setting(
        "file.py:name or module:name of fn(prompt, response, row) or fn(prompts, responses, rows), "
        "plain or async; or a map name -> weight * function, or name -> {source: function}; model "
        "is the model's score.",
        None,
        type_words="str, map of name -> str, or none",
    )
    source_column: str = setting(
        "Column with the data source of a row, for a table {source: function}.", SOURCE_COLUMN
    )
    num_processes: int = setting("Worker processes for functions, on each rank.", 1, at_least=1)
    sample_seconds: float = setting("Limit for one call of a function.", 10.0, above=0)
    concurrency: int = setting("Calls of async functions at once, on each rank.", 64, at_least=1)
    retries: int = setting(
        "How often a call that raised is repeated, within sample_seconds.", 0, at_least=0
    )
    on_error: str = setting(
        "A function fails on a sample: raise: the run ends; drop: the row is not learnt from; "
        "zero: that function's score is 0.",
        "raise",
        one_of=("raise", "drop", "zero"),
    )
    max_failed_fraction: float = setting(MAX_FAILED_DOC, 0.1, at_least=0, at_most=1)
    tokenizer_path: str = follows("data.tokenizer_path", "")  # to decode responses


@dataclass
class ScriptConfig:
    """What every script that trains has."""

    # Not a setting: the map function of the script that reads old_log_probs before the update.
    reader_of_old_log_probs: ClassVar[str | None] = None

    run: RunConfig = part(RunConfig)
    # Any: a preset's name or a map; config/placement.py reads it
    placement: Any = setting(
        "colocate, split, standalone, auto, or a map pool -> {roles: [...], ranks: [...]}.",
        "colocate",
        type_words=PLACEMENT_TYPE,
    )
    total_steps: int = setting("Steps of the run.", 100, at_least=1)
    eval_every: int = setting("Steps between evaluations (0: never).", 10, at_least=0)
    save_every: int = setting(
        "Steps between checkpoints (0: only the last one, see run.save_last, and on a signal).",
        0,
        at_least=0,
    )


@dataclass
class PPOConfig(ScriptConfig):
    """Everything `algos/ppo.py` reads."""

    data: DataConfig = part(DataConfig)
    actor: ActorConfig = part(ActorConfig)
    critic: CriticConfig = part(CriticConfig)
    reference: ReferenceConfig = part(ReferenceConfig)
    reward: RewardConfig = part(RewardConfig)
    advantage: AdvantageConfig = part(AdvantageConfig)
