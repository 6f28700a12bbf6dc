"""spmdflow trains language models with reinforcement learning: one script, one `torchrun` command.

A *controller* (a thread of rank 0) runs the algorithm's script once. The script calls *worker
groups*: a model spread over the ranks of a *resource pool*. A *transfer protocol* says which rows
each rank gets and who answers. HybridFlow (arXiv 2409.19256) on plain `torch.distributed`.

Start reading at `algos/ppo.py`; start running at `python -m spmdflow`.
"""

from __future__ import annotations

from importlib import import_module

__version__ = "0.1.0"

_HOMES = {
    "PPOConfig": "spmdflow.config.schema",
    "GRPOConfig": "spmdflow.config.algorithm",
    "GRPOAsyncConfig": "spmdflow.config.algorithm",
    "SafeRLHFConfig": "spmdflow.config.algorithm",
    "DAPOConfig": "spmdflow.config.algorithm",
    "RemaxConfig": "spmdflow.config.algorithm",
    "RLOOConfig": "spmdflow.config.algorithm",
    "ReinforcePPConfig": "spmdflow.config.algorithm",
    "SFTConfig": "spmdflow.config.offline",
    "EvaluateConfig": "spmdflow.config.offline",
    "RewardModelRunConfig": "spmdflow.config.offline",
    "DPOConfig": "spmdflow.config.offline",
    "CorrectionConfig": "spmdflow.config.algorithm",
    "ActorConfig": "spmdflow.config.schema",
    "SurrogateActorConfig": "spmdflow.config.algorithm",
    "AdvantageConfig": "spmdflow.config.schema",
    "CriticConfig": "spmdflow.config.schema",
    "DataConfig": "spmdflow.config.schema",
    "EngineConfig": "spmdflow.config.schema",
    "ModelConfig": "spmdflow.config.schema",
    "OptimizerConfig": "spmdflow.config.schema",
    "PreferenceLossConfig": "spmdflow.config.offline",
    "ReferenceConfig": "spmdflow.config.schema",
    "RewardConfig": "spmdflow.config.schema",
    "RolloutConfig": "spmdflow.config.schema",
    "RunConfig": "spmdflow.config.schema",
    "UpdateConfig": "spmdflow.config.schema",
    "setting": "spmdflow.config.leaf",
    "part": "spmdflow.config.leaf",
    "ActorWorker": "spmdflow.models.policy",
    "PolicyWorker": "spmdflow.models.policy",
    "SupervisedWorker": "spmdflow.models.policy",
    "RewardModelWorker": "spmdflow.models.preference",
    "PreferenceWorker": "spmdflow.models.preference",
    "AnswerReferenceWorker": "spmdflow.models.preference",
    "GeneratorWorker": "spmdflow.models.generator",
    "CriticWorker": "spmdflow.models.critic",
    "FSDPWorker": "spmdflow.models.base",
    "ZeROWorker": "spmdflow.models.base",
    "ThreeDParallelWorker": "spmdflow.models.base",
    "ReferenceWorker": "spmdflow.models.policy",
    "RewardWorker": "spmdflow.models.reward",
    "CostWorker": "spmdflow.models.reward",
    "CostCriticWorker": "spmdflow.models.critic",
    "Flow": "spmdflow.controller.flow",
    "DynamicSampling": "spmdflow.controller.prompts",
    "launch": "spmdflow.program",
    "load_settings": "spmdflow.program",
    "Outcome": "spmdflow.runtime.launch",
    "compute_advantages": "spmdflow.objectives.advantage",
    "as_baseline": "spmdflow.objectives.advantage",
    "AdaptiveKL": "spmdflow.objectives.kl",
    "measure_kl": "spmdflow.objectives.kl",
    "compute_safe_advantages": "spmdflow.objectives.advantage",
    "LagrangeMultiplier": "spmdflow.objectives.advantage",
    "compute_rollout_weights": "spmdflow.objectives.kl",
    "add_overlong_penalty": "spmdflow.objectives.advantage",
    "advantage": "spmdflow.objectives.estimator",
    "policy_loss": "spmdflow.objectives.policy",
    "preference_loss": "spmdflow.objectives.preference",
    "map_function": "spmdflow.transfer.register",
    "register": "spmdflow.transfer.register",
    "Worker": "spmdflow.transfer.worker",
    "Protocol": "spmdflow.transfer.protocol",
    "Answer": "spmdflow.transfer.protocol",
    "register_protocol": "spmdflow.transfer.protocol",
    "EngineKind": "spmdflow.kind.engine",
    "Sharding": "spmdflow.kind.engine",
    "EngineOption": "spmdflow.kind.engine",
    "register_engine": "spmdflow.kind.engine",
    "GeneratorKind": "spmdflow.kind.generator",
    "register_generator": "spmdflow.kind.generator",
    "Mean": "spmdflow.transfer.worker",
    "Sum": "spmdflow.transfer.worker",
    "Max": "spmdflow.transfer.worker",
    "WorkerContext": "spmdflow.transfer.worker",
    "Batch": "spmdflow.controller.batch",
    "concatenate": "spmdflow.controller.batch",
    "WorkerGroup": "spmdflow.controller.group",
    "Step": "spmdflow.controller.step",
    "pad": "spmdflow.data.ragged",
    "ragged": "spmdflow.data.ragged",
    "ragged_from_rows": "spmdflow.data.ragged",
    "rows_of": "spmdflow.data.ragged",
    "lengths_of": "spmdflow.data.ragged",
    "load_tokenizer": "spmdflow.datasets.tokenizer",
    "SupervisedLoss": "spmdflow.objectives.supervised",
    "SpmdflowError": "spmdflow.errors",
    "ConfigError": "spmdflow.errors",
    "RunFailed": "spmdflow.errors",
}
"""Public name -> the module it lives in; loaded at first use, so that refusals need no torch."""

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    """The public object `name`, imported from its home at first use."""
    if name not in _HOMES:
        raise AttributeError(f"spmdflow has no public name {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """The public names, which are not there before their first use, and the module's own."""
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
