"""spmdflow trains language models with reinforcement learning: one script, one `torchrun` command.

A *controller* (a thread of rank 0) runs the algorithm's script once. The script calls *worker
groups*: a model spread over the ranks of a *resource pool*. A *transfer protocol* says which rows
each rank gets and who answers. HybridFlow (arXiv 2409.19256) on plain `torch.distributed`.

Start reading at `algos/ppo.py`; start running at `python -m spmdflow`. docs/MAINTAINERS.md names
the files of the package to read first.

| part | packages |
|---|---|
| library | objectives, rewards, datasets, envs, episodes |
| system: what all need | errors, log, message, derivative, renamed, deferred_name, requirement |
| system: files and settings | source_file, kind, config |
| system: layouts, rows, weights | parallel, blocks, data, transfer, weights, hybrid_engine |
| system: models on a rank | worker_api, models, workers, rollout, cpu, router |
| system: the start of a run | start, torchrun, run, program |
| system: a run | controller, runtime, failure, checkpoint, tracking |
| tools: before runs | preview, plan, mapping, doctor, show_weights, sweep |
| tools: during runs | status, live |
| tools: after runs | view, report, throughput, export, replay, clean, serving |

The *library* is what a script calls by name: formulas, scores, data and agents. It uses settings
and columns, but nothing that runs. The *system* trains. The *tools* look at a run, plan one, or
pass on what it made. Nobody needs them in order to train.

| file | what |
|---|---|
| start, torchrun | `spmdflow run`: checks a command line, then becomes torchrun, quietly |
| run, program | one rank of a run; runs started by a Python program |
| sweep | runs of one script for each combination of some settings |
| show_weights | which elements of a model each rank has |
| clean | removes from RUN_DIRs what only helped to look at something |
| replay | runs a kept step again and compares |
| report, status, live | what runs reached; what a live run does now |
| export | a trained model of a checkpoint as a Hugging Face folder |
| errors, log | every error that a user can meet; the log lines of a rank |
| router | which experts of a mixture each token gets, recorded or repeated |
| message | commands and replies as bytes |
| derivative | backward functions that refuse to be differentiated themselves |
| renamed | old names of public things, which warn for one release |
| requirement | what to install for an optional feature |
| deferred_name | public names that are not imported before they are used |
| source_file | imports files that users edit, always from their source |
"""

from __future__ import annotations

from spmdflow.deferred_name import find_name
from spmdflow.renamed import GONE_NAMES

__version__ = "0.2.0"

_NAMES = {
    "spmdflow.config.algorithm": (
        "CorrectionConfig DAPOConfig DistillConfig GRPOAsyncConfig GRPOConfig "
        "GroupAdvantageConfig RLOOConfig ReinforcePPConfig RemaxConfig SafeRLHFConfig "
        "SurrogateActorConfig SurrogateLossConfig TeacherConfig"
    ),
    "spmdflow.config.episode": "AgentActorConfig EpisodeConfig GRPOAgentConfig",
    "spmdflow.config.leaf": "part setting",
    "spmdflow.config.offline": (
        "DPOConfig EvaluateConfig PreferenceLossConfig RewardModelRunConfig SFTConfig"
    ),
    "spmdflow.config.schema": (
        "ActorConfig AdvantageConfig CriticConfig DataConfig EngineConfig ModelConfig "
        "OptimizerConfig PPOConfig ReferenceConfig RewardConfig RolloutConfig RunConfig "
        "UpdateConfig"
    ),
    "spmdflow.controller.batch": "Batch concatenate",
    "spmdflow.controller.flow": "Flow",
    "spmdflow.controller.group": "WorkerGroup",
    "spmdflow.controller.prompts": "DynamicSampling",
    "spmdflow.controller.step": "Step",
    "spmdflow.data.ragged": "lengths_of pad ragged ragged_from_rows rows_of",
    "spmdflow.data.row_id": "RowGroups",
    "spmdflow.datasets.tokenizer": "decode_responses load_tokenizer",
    "spmdflow.envs.client": "ChatClient EndpointError",
    "spmdflow.errors": "ConfigError RunFailed SpmdflowError",
    "spmdflow.kind.engine": "EngineKind EngineOption Sharding register_engine",
    "spmdflow.kind.generator": "GeneratorKind register_generator",
    "spmdflow.kind.registry": "register_tracker",
    "spmdflow.models.base": "EngineWorker FSDPWorker ThreeDParallelWorker ZeROWorker",
    "spmdflow.models.critic": "CostCriticWorker CriticWorker",
    "spmdflow.models.generator": "GeneratorWorker",
    "spmdflow.models.policy": "ActorWorker PolicyWorker ReferenceWorker SupervisedWorker",
    "spmdflow.models.preference": "AnswerReferenceWorker PreferenceWorker RewardModelWorker",
    "spmdflow.models.reward": "CostWorker RewardWorker",
    "spmdflow.objectives.advantage": (
        "LagrangeMultiplier add_overlong_penalty as_baseline compute_advantages "
        "compute_safe_advantages compute_teacher_rewards"
    ),
    "spmdflow.objectives.covariance": "mark_covariant_tokens",
    "spmdflow.objectives.estimator": "Samples advantage",
    "spmdflow.objectives.kl": "AdaptiveKL compute_rollout_weights measure_kl",
    "spmdflow.objectives.log_prob": "CausalOutput ScalarOutput",
    "spmdflow.objectives.loss": "Loss Micro",
    "spmdflow.objectives.preference": "AnswerPair preference_loss",
    "spmdflow.objectives.supervised": "SupervisedLoss",
    "spmdflow.objectives.surrogate": "policy_loss",
    "spmdflow.program": "launch load_settings",
    "spmdflow.runtime.launch": "Outcome",
    "spmdflow.tracking.progress": "Sample",
    "spmdflow.tracking.reading": "RunFiles",
    "spmdflow.tracking.tracker": "Sink",
    "spmdflow.transfer.protocol": "Answer Protocol register_protocol",
    "spmdflow.worker_api.metric": "Max Mean Min Sum",
    "spmdflow.worker_api.register": "map_function register",
    "spmdflow.worker_api.worker": "Worker WorkerContext",
}
"""Module -> its public names. Imported at first use, so checking settings does not load torch."""
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    """The public object `name`, imported from its module at first use (see deferred_name).

    ImportError for a name of before 0.2.0, which says what replaces it: of an AttributeError,
    `from spmdflow import name` would drop the text.
    """
    if name in GONE_NAMES:
        raise ImportError(f"spmdflow.{name} is gone since 0.2.0; use {GONE_NAMES[name]}")
    if name not in _HOMES:
        raise AttributeError(f"spmdflow has no public name {name!r}; it has {', '.join(__all__)}")
    return find_name(_HOMES[name], name)


def __dir__() -> list[str]:
    """The public names, also those not imported yet, and the module's own."""
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
