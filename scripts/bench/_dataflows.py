"""The paper's models and algorithms as data flows: what `find_mapping` is asked in the benchmark.

A run's own data flow is made by `spmdflow.plan` of its script.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from spmdflow.mapping.dataflow import Call, Dataflow, Model, Rollout, Workload
from spmdflow.mapping.shape import ModelShape

Part = ModelShape | Model
"""A model, or only its shape where the defaults will do."""

GENERATION, PREPARATION, LEARNING = "generation", "preparation", "learning"


def ppo(
    actor: Part,
    critic: Part,
    *,
    reference: Part,
    reward: Part,
    workload: Workload,
    log_prob: bool = True,
) -> Dataflow:
    """The paper's PPO (Fig. 1); without log_prob the actor's recomputation is left out (Table 4
    calls it optional)."""
    frozen = (_frozen("reference", reference), _scorer("reward", reward))
    models = (_policy(actor), _scorer("critic", critic, trained=True), *frozen)
    calls = _generation(workload)
    calls += _infer("actor", "compute_log_prob", workload) if log_prob else ()
    calls += _infer("critic", "compute_values", workload)
    calls += _infer("reference", "compute_ref_log_prob", workload)
    calls += _infer("reward", "compute_reward", workload)
    calls += _train("critic", "update_critic", workload)
    calls += _train("actor", "update_actor", workload)
    return Dataflow(models, calls)


def remax(actor: Part, *, reference: Part, reward: Part, workload: Workload) -> Dataflow:
    """ReMax: a sampled and a greedy response, both scored, no critic."""
    models = (_policy(actor), _frozen("reference", reference), _scorer("reward", reward))
    calls = (*_generation(workload), *_generation(workload, "generate_greedy"))
    calls += _infer("actor", "compute_log_prob", workload)
    calls += _infer("reference", "compute_ref_log_prob", workload)
    calls += _infer("reward", "compute_reward_greedy", workload)
    calls += _infer("reward", "compute_reward", workload)
    return Dataflow(models, calls + _train("actor", "update_actor", workload))


def grpo(actor: Part, *, reference: Part, reward: Part, workload: Workload) -> Dataflow:
    """GRPO: groups of samples, no critic; num_sequences counts samples."""
    models = (_policy(actor), _frozen("reference", reference), _scorer("reward", reward))
    calls = _generation(workload)
    calls += _infer("actor", "compute_log_prob", workload)
    calls += _infer("reference", "compute_ref_log_prob", workload)
    calls += _infer("reward", "compute_reward", workload)
    return Dataflow(models, calls + _train("actor", "update_actor", workload))


def grpo_async(actor: Part, *, reference: Part, reward: Part, workload: Workload) -> Dataflow:
    """GRPO one step off policy: a generator on ranks of its own, one stage for all calls."""
    flow = grpo(actor, reference=reference, reward=reward, workload=workload)
    policy = flow.model("actor")
    trainer = replace(policy, rollout=None)
    generator = replace(policy, name="generator", trained=False, weights_from="actor")
    models = (trainer, generator, *flow.models[1:])
    calls = tuple(
        replace(call, stage="step", model="generator" if call.kind == "generate" else call.model)
        for call in flow.calls
    )
    apart = tuple(("generator", model.name) for model in models if model.name != "generator")
    return Dataflow(models, calls, apart)


def safe_rlhf(
    actor: Part,
    critic: Part,
    *,
    reference: Part,
    reward: Part,
    cost: Part,
    workload: Workload,
    cost_critic: Part | None = None,
) -> Dataflow:
    """Safe-RLHF: PPO with a cost model, and a critic of costs if given."""
    flow = ppo(actor, critic, reference=reference, reward=reward, workload=workload)
    models = (*flow.models, _scorer("cost", cost))
    ahead, updates = flow.calls[:-2], flow.calls[-2:]
    calls = (*ahead, *_infer("cost", "compute_cost", workload), *updates)
    if cost_critic is not None:
        models += (_scorer("cost_critic", cost_critic, trained=True),)
        calls += _infer("cost_critic", "compute_cost_values", workload)
        calls += _train("cost_critic", "update_cost_critic", workload)
    return Dataflow(models, calls)


def _policy(part: Part) -> Model:
    if isinstance(part, Model):
        return part
    return Model("actor", part, trained=True, rollout=Rollout())


def _frozen(name: str, part: Part) -> Model:
    return part if isinstance(part, Model) else Model(name, part)


def _scorer(name: str, part: Part, *, trained: bool = False) -> Model:
    if isinstance(part, Model):
        return part
    return Model(name, replace(part, scalar_head=True), trained=trained)


def _generation(workload: Workload, name: str = "generate_sequences") -> tuple[Call, ...]:
    return (Call("actor", "generate", GENERATION, workload, name),)


def _infer(model: str, name: str, workload: Workload) -> tuple[Call, ...]:
    return (Call(model, "infer", PREPARATION, workload, name),)


def _train(model: str, name: str, workload: Workload) -> tuple[Call, ...]:
    return (Call(model, "train", LEARNING, workload, name),)


def _llama(name: str, billions: int, layers: int, hidden: int, ffn: int, kv: int) -> ModelShape:
    return ModelShape(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        ffn_size=ffn,
        num_heads=hidden // 128,
        num_kv_heads=kv,
        head_dim=128,
        vocab_size=32000,
        nominal_parameters=billions * 10**9,
    )


NOMINAL: Mapping[str, ModelShape] = {
    "7B": _llama("7B", 7, 32, 4096, 11008, 32),
    "13B": _llama("13B", 13, 40, 5120, 13824, 40),
    "34B": _llama("34B", 34, 48, 8192, 22016, 8),
    "70B": _llama("70B", 70, 80, 8192, 28672, 8),
}
"""The paper's models: Llama 2 (7B, 13B, 70B) and Code Llama's 34B, parameters as in their names."""

EMPTY = ModelShape("none", 1, 1, 1, 1, 1, 1, 1, scalar_head=True, nominal_parameters=0)
"""A role without weights, such as a reward function; its calls have fixed seconds."""
