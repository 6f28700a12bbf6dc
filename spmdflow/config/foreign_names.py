"""Names of settings in TRL, verl and OpenRLHF, and the settings that do the same here.

An unknown key of a file or command line that is one of their names is answered with ours
(`load`). docs/COMING_FROM.md has the same table.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple


class ForeignName(NamedTuple):
    """One setting of another library."""

    name: str
    """As it is written there; of verl, with the sections that tell it from others."""
    settings: tuple[str, ...]
    """The settings that do the same, most likely first: a script has only some of them."""
    remark: str = ""
    """What differs, for the page."""


TRL = (
    ForeignName("model_name_or_path", ("actor.model.path", "reward_model.model.path")),
    ForeignName("dataset_name", ("data.train_path",)),
    ForeignName("output_dir", ("run.dir",)),
    ForeignName("run_name", ("run.name",)),
    ForeignName("seed", ("run.seed",)),
    ForeignName("temperature", ("actor.rollout.temperature",)),
    ForeignName("top_p", ("actor.rollout.top_p",)),
    ForeignName("weight_decay", ("actor.optimizer.weight_decay",)),
    ForeignName(
        "peft_config",
        ("actor.model.lora.rank",),
        "with alpha, targets, rslora, dropout and modules_to_save of the same section",
    ),
    ForeignName("lora_r", ("actor.model.lora.rank",)),
    ForeignName("lora_target_modules", ("actor.model.lora.targets",)),
    ForeignName("lora_modules_to_save", ("actor.model.lora.modules_to_save",)),
    ForeignName("use_rslora", ("actor.model.lora.rslora",)),
    ForeignName("report_to", ("run.trackers",)),
    ForeignName("log_completions", ("run.sample_every",), "steps between samples"),
    ForeignName("learning_rate", ("actor.optimizer.lr", "reward_model.optimizer.lr")),
    ForeignName(
        "lr_scheduler_type", ("actor.optimizer.schedule", "reward_model.optimizer.schedule")
    ),
    ForeignName(
        "warmup_ratio",
        ("actor.optimizer.warmup_steps", "reward_model.optimizer.warmup_steps"),
        "a number of optimizer steps",
    ),
    ForeignName("optim", ("actor.optimizer.name", "reward_model.optimizer.name")),
    ForeignName("adam_beta1", ("actor.optimizer.betas", "reward_model.optimizer.betas")),
    ForeignName("adam_beta2", ("actor.optimizer.betas", "reward_model.optimizer.betas")),
    ForeignName("max_grad_norm", ("actor.optimizer.clip_norm", "reward_model.optimizer.clip_norm")),
    ForeignName("max_steps", ("total_steps",)),
    ForeignName("num_train_epochs", ("total_steps",), "a number of steps, not of passes"),
    ForeignName("save_steps", ("save_every",)),
    ForeignName("save_total_limit", ("run.keep_checkpoints",)),
    ForeignName("eval_steps", ("eval_every",)),
    ForeignName("load_best_model_at_end", ("run.keep_best",), "a metric"),
    ForeignName("resume_from_checkpoint", ("run.resume",), "auto: the same command continues"),
    ForeignName("hub_model_id", ("run.push_to_hub",)),
    ForeignName("bf16", ("actor.model.dtype", "reward_model.model.dtype"), "bfloat16"),
    ForeignName("torch_dtype", ("actor.model.dtype", "reward_model.model.dtype")),
    ForeignName(
        "gradient_checkpointing",
        ("actor.engine.options", "reward_model.engine.options"),
        "[recompute]",
    ),
    ForeignName(
        "per_device_train_batch_size",
        ("actor.engine.micro_batch_rows", "reward_model.engine.micro_batch_rows"),
        "rows of one forward; accumulation follows from mini_batch_size",
    ),
    ForeignName(
        "gradient_accumulation_steps",
        ("actor.update.mini_batch_size", "reward_model.update.mini_batch_size"),
        "samples of one optimizer step, over all ranks",
    ),
    ForeignName("num_generations", ("data.samples_per_prompt",)),
    ForeignName("generation_batch_size", ("data.prompts_per_step",), "prompts, not samples"),
    ForeignName(
        "steps_per_generation",
        ("actor.update.mini_batch_size",),
        "samples of a step divided by it",
    ),
    ForeignName("num_iterations", ("actor.update.num_epochs",)),
    ForeignName("num_ppo_epochs", ("actor.update.num_epochs",)),
    ForeignName(
        "num_mini_batches",
        ("actor.update.mini_batch_size",),
        "samples of a step divided by it",
    ),
    ForeignName("max_prompt_length", ("data.max_prompt_tokens",)),
    ForeignName("max_completion_length", ("actor.rollout.max_new_tokens",)),
    ForeignName("response_length", ("actor.rollout.max_new_tokens",)),
    ForeignName("max_tokens", ("actor.rollout.max_new_tokens",)),
    ForeignName("beta", ("actor.loss.beta", "actor.loss.kl_coef"), "of dpo; of others"),
    ForeignName("epsilon", ("actor.loss.clip_ratio",)),
    ForeignName("epsilon_high", ("actor.loss.clip_ratio_high",)),
    ForeignName("delta", ("actor.loss.dual_clip",)),
    ForeignName(
        "loss_type",
        ("actor.loss.name", "actor.loss.aggregation"),
        "of dpo; of others, how token losses are averaged",
    ),
    ForeignName("importance_sampling_level", ("actor.loss.surrogate",), "gspo"),
    ForeignName("scale_rewards", ("advantage.estimator",), "dr_grpo does not scale"),
    ForeignName("reward_funcs", ("reward.function",)),
    ForeignName("reward_weights", ("reward.function",), "a map of terms with weights"),
    ForeignName("cliprange", ("actor.loss.clip_ratio",)),
    ForeignName("cliprange_value", ("critic.loss.clip_range",)),
    ForeignName("reward_model_path", ("reward.model.path",)),
    ForeignName("use_vllm", ("actor.rollout.engine",), "vllm"),
    ForeignName("vllm_mode", ("placement",)),
    ForeignName("vllm_tensor_parallel_size", ("actor.rollout.layout",), "tN"),
    ForeignName("vllm_gpu_memory_utilization", ("actor.rollout.kv_cache_fraction",)),
    ForeignName("vllm_importance_sampling_correction", ("actor.update.correction.kind",)),
)

VERL = (
    ForeignName("data.train_files", ("data.train_path",)),
    ForeignName("data.val_files", ("data.eval_path",)),
    ForeignName("data.prompt_key", ("data.prompt_column",)),
    ForeignName("data.train_batch_size", ("data.prompts_per_step",)),
    ForeignName("data.max_prompt_length", ("data.max_prompt_tokens",)),
    ForeignName("data.max_response_length", ("actor.rollout.max_new_tokens",)),
    ForeignName("actor_rollout_ref.model.path", ("actor.model.path",)),
    ForeignName("model.enable_gradient_checkpointing", ("actor.engine.options",), "[recompute]"),
    ForeignName("model.lora_rank", ("actor.model.lora.rank",)),
    ForeignName("model.lora_alpha", ("actor.model.lora.alpha",)),
    ForeignName("model.target_modules", ("actor.model.lora.targets",)),
    ForeignName("model.lora_adapter_path", ("actor.model.lora.adapter",)),
    ForeignName("actor.strategy", ("actor.engine.kind",)),
    ForeignName("actor.optim.lr", ("actor.optimizer.lr",)),
    ForeignName("optim.lr_warmup_steps", ("actor.optimizer.warmup_steps",)),
    ForeignName("actor.grad_clip", ("actor.optimizer.clip_norm",)),
    ForeignName(
        "actor.ppo_mini_batch_size",
        ("actor.update.mini_batch_size",),
        "samples: theirs counts prompts",
    ),
    ForeignName("actor.ppo_micro_batch_size_per_gpu", ("actor.engine.micro_batch_rows",)),
    ForeignName("actor.ppo_max_token_len_per_gpu", ("actor.engine.micro_batch_tokens",)),
    ForeignName("actor.use_dynamic_bsz", ("actor.engine.micro_batch_tokens",), "always so"),
    ForeignName("actor.ppo_epochs", ("actor.update.num_epochs",)),
    ForeignName("actor.clip_ratio_low", ("actor.loss.clip_ratio",)),
    ForeignName("actor.clip_ratio_high", ("actor.loss.clip_ratio_high",)),
    ForeignName("actor.clip_ratio_c", ("actor.loss.dual_clip",)),
    ForeignName("actor.entropy_coeff", ("actor.loss.entropy_coef",)),
    ForeignName("actor.use_kl_loss", ("actor.loss.kl_coef",), "0 is off"),
    ForeignName("actor.kl_loss_coef", ("actor.loss.kl_coef",)),
    ForeignName("actor.kl_loss_type", ("actor.loss.kl_estimator",)),
    ForeignName("actor.loss_agg_mode", ("actor.loss.aggregation",)),
    ForeignName("policy_loss.loss_mode", ("actor.loss.surrogate",)),
    ForeignName("fsdp_config.param_offload", ("actor.engine.offload",), "[parameters]"),
    ForeignName("fsdp_config.optimizer_offload", ("actor.engine.offload",), "[optimizer]"),
    ForeignName(
        "ulysses_sequence_parallel_size",
        ("actor.engine.layout", "reference.engine.layout", "critic.engine.layout"),
        "cN",
    ),
    ForeignName("fsdp_config.fsdp_size", ("actor.engine.layout",), "sN"),
    ForeignName("rollout.name", ("actor.rollout.engine",)),
    ForeignName("rollout.n", ("data.samples_per_prompt",)),
    ForeignName("rollout.response_length", ("actor.rollout.max_new_tokens",)),
    ForeignName("rollout.tensor_model_parallel_size", ("actor.rollout.layout",), "tN"),
    ForeignName("rollout.gpu_memory_utilization", ("actor.rollout.kv_cache_fraction",)),
    ForeignName("rollout.max_num_seqs", ("actor.rollout.max_batch_size",)),
    ForeignName("val_kwargs.n", ("data.eval_samples",)),
    ForeignName("algorithm.adv_estimator", ("advantage.estimator",), "otherwise the script"),
    ForeignName("algorithm.use_kl_in_reward", ("advantage.kl_coef",), "0 is off"),
    ForeignName("kl_ctrl.kl_coef", ("advantage.kl_coef",)),
    ForeignName("algorithm.norm_adv_by_std_in_grpo", ("advantage.estimator",), "dr_grpo"),
    ForeignName("critic.cliprange_value", ("critic.loss.clip_range",)),
    ForeignName("reward_model.model.path", ("reward.model.path",)),
    ForeignName("custom_reward_function.path", ("reward.function",), "FILE.py:NAME"),
    ForeignName("data.reward_fn_key", ("reward.source_column",)),
    ForeignName("custom_reward_function.name", ("reward.function",), "FILE.py:NAME"),
    ForeignName("trainer.total_epochs", ("total_steps",), "a number of steps"),
    ForeignName("trainer.total_training_steps", ("total_steps",)),
    ForeignName("trainer.save_freq", ("save_every",)),
    ForeignName("trainer.test_freq", ("eval_every",)),
    ForeignName("trainer.val_before_train", ("eval_every",), "step 0 is always evaluated"),
    ForeignName("trainer.logger", ("run.trackers",)),
    ForeignName("trainer.project_name", ("run.trackers",)),
    ForeignName("trainer.experiment_name", ("run.name",)),
    ForeignName("trainer.default_local_dir", ("run.dir",)),
    ForeignName("trainer.resume_mode", ("run.resume",)),
    ForeignName("trainer.max_actor_ckpt_to_keep", ("run.keep_checkpoints",)),
)

OPENRLHF = (
    ForeignName("pretrain", ("actor.model.path",)),
    ForeignName("reward_pretrain", ("reward.model.path",)),
    ForeignName("critic_pretrain", ("critic.model.path",)),
    ForeignName("remote_rm_url", ("reward.function",), "a function that asks the server"),
    ForeignName("prompt_data", ("data.train_path",)),
    ForeignName("eval_dataset", ("data.eval_path",)),
    ForeignName("input_key", ("data.prompt_column",)),
    ForeignName("apply_chat_template", ("data.chat_template",)),
    ForeignName("rollout_batch_size", ("data.prompts_per_step",)),
    ForeignName("n_samples_per_prompt", ("data.samples_per_prompt",)),
    ForeignName("train_batch_size", ("actor.update.mini_batch_size",)),
    ForeignName("micro_train_batch_size", ("actor.engine.micro_batch_rows",)),
    ForeignName("micro_rollout_batch_size", ("actor.rollout.max_batch_size",)),
    ForeignName("max_epochs", ("actor.update.num_epochs",)),
    ForeignName("num_episodes", ("total_steps",), "a number of steps"),
    ForeignName("prompt_max_len", ("data.max_prompt_tokens",)),
    ForeignName("generate_max_len", ("actor.rollout.max_new_tokens",)),
    ForeignName("actor_learning_rate", ("actor.optimizer.lr",)),
    ForeignName("critic_learning_rate", ("critic.optimizer.lr",)),
    ForeignName("init_kl_coef", ("advantage.kl_coef",)),
    ForeignName("use_kl_loss", ("actor.loss.kl_coef",), "instead of advantage.kl_coef"),
    ForeignName("kl_estimator", ("actor.loss.kl_estimator",)),
    ForeignName("eps_clip", ("actor.loss.clip_ratio",)),
    ForeignName("value_clip", ("critic.loss.clip_range",)),
    ForeignName("entropy_loss_coef", ("actor.loss.entropy_coef",)),
    ForeignName("lambd", ("advantage.lam",)),
    ForeignName("advantage_estimator", ("advantage.estimator",), "otherwise the script"),
    ForeignName("zero_stage", ("actor.engine.kind",), "zero1, zero2, zero3"),
    ForeignName("adam_offload", ("actor.engine.offload",), "[optimizer]"),
    ForeignName("colocate_all_models", ("placement",), "colocate"),
    ForeignName("vllm_tensor_parallel_size", ("actor.rollout.layout",), "tN"),
    ForeignName("vllm_gpu_memory_utilization", ("actor.rollout.kv_cache_fraction",)),
    ForeignName("save_path", ("run.dir",)),
    ForeignName("ckpt_path", ("run.dir",)),
    ForeignName("max_ckpt_num", ("run.keep_checkpoints",)),
    ForeignName("load_checkpoint", ("run.resume",)),
    ForeignName("use_wandb", ("run.trackers",), "[wandb]"),
    ForeignName("lora_rank", ("actor.model.lora.rank",)),
    ForeignName("lora_alpha", ("actor.model.lora.alpha",)),
    ForeignName("lora_dropout", ("actor.model.lora.dropout",)),
    ForeignName("target_modules", ("actor.model.lora.targets",)),
)

ALMOST_OURS = (
    ForeignName("batch_size", ("data.prompts_per_step",)),
    ForeignName("epochs", ("actor.update.num_epochs", "reward_model.update.num_epochs")),
    ForeignName("lambda", ("advantage.lam",)),
)
"""Words of no library in particular that people try."""

FOREIGN_NAMES = (*TRL, *VERL, *OPENRLHF, *ALMOST_OURS)


def setting_for(key: str, known: Collection[str]) -> str | None:
    """Return the setting that does what `key` does in TRL, verl or OpenRLHF; None if it is unknown.

    A key matches the foreign name whose words are the last words of the key, or the key itself
    those of the name; the longest match wins, then a name that is the key. Settings of the key's
    own first section come first: critic.optimizer.learning_rate gives critic.optimizer.lr.
    known: keys of the script's settings.
    """
    section = key.partition(".")[0]
    words = key.split(".")
    matches = []
    for foreign in FOREIGN_NAMES:
        length = _num_common_last_words(words, foreign.name.split("."))
        if length:
            matches.append((length, foreign.name == key, foreign))
    matches.sort(key=lambda match: match[:2], reverse=True)
    for *_, foreign in matches:
        for setting in foreign.settings:
            in_section = f"{section}.{setting.partition('.')[2]}"
            if in_section in known:
                return in_section
            if setting in known:
                return setting
    return None


def _num_common_last_words(key: list[str], name: list[str]) -> int:
    """Return the number of words of the shorter one if it is the end of the other, otherwise 0."""
    length = min(len(key), len(name))
    return length if key[-length:] == name[-length:] else 0
