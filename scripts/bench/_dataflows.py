"""The paper's models and algorithms as data flows: what `find_mapping` is asked in the benchmark.

A run's own data flow is made by `spmdflow.plan` of its script.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from spmdflow.mapping.dataflow import Dataflow, Model, ModelCall, Rollout, Workload
from spmdflow.weights.architecture import Architecture

Part = Architecture | Model
"""A model, or only its shape where the defaults will do."""

GENERATION = "generation"
PREPARATION = "preparation"
LEARNING = "learning"


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
    ahead = flow.calls[:-2]
    updates = flow.calls[-2:]
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
    return Model(name, replace(part, head="scalar"), trained=trained)


def _generation(workload: Workload, name: str = "generate_sequences") -> tuple[ModelCall, ...]:
    return (ModelCall("actor", "generate", GENERATION, workload, name),)


def _infer(model: str, name: str, workload: Workload) -> tuple[ModelCall, ...]:
    return (ModelCall(model, "infer", PREPARATION, workload, name),)


def _train(model: str, name: str, workload: Workload) -> tuple[ModelCall, ...]:
    return (ModelCall(model, "train", LEARNING, workload, name),)


@dataclass(frozen=True)
class Nominal(Architecture):
    """A model whose weights count as its name says, as the paper's figures do."""

    name: str = ""
    nominal_parameters: int | None = None
    """None: counted."""

    @property
    def num_parameters(self) -> int:
        """The size in the model's name."""
        counted = super().num_parameters
        return counted if self.nominal_parameters is None else self.nominal_parameters


def llama(
    name: str,
    layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    kv_heads: int,
    *,
    parameters: int | None = None,
) -> Nominal:
    """A Llama of these sizes, heads of 128, 32,000 words."""
    sizes = {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "vocab_size": 32000,
    }
    return replace(Nominal.from_config(sizes), name=name, nominal_parameters=parameters)


def _paper(name: str, layers: int, hidden: int, ffn: int, kv_heads: int) -> Nominal:
    billions = int(name.removesuffix("B")) * 10**9
    return llama(name, layers, hidden, ffn, hidden // 128, kv_heads, parameters=billions)


NOMINAL: Mapping[str, Nominal] = {
    "7B": _paper("7B", 32, 4096, 11008, 32),
    "13B": _paper("13B", 40, 5120, 13824, 40),
    "34B": _paper("34B", 48, 8192, 22016, 8),
    "70B": _paper("70B", 80, 8192, 28672, 8),
}
"""The paper's models: Llama 2 (7B, 13B, 70B) and Code Llama's 34B, parameters as in their names."""

EMPTY = replace(llama("none", 1, 1, 1, 1, 1, parameters=0), head="scalar")
"""A role without weights, such as a reward function; its calls have fixed seconds."""
