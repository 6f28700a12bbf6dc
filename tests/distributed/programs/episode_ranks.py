"""The scripted episodes of 24 rows on 1, 2 and 4 ranks, with random sleeps but on one; then turns
of the script's own, in which some rows go on.

Every rank of a process group calls `run_all`, or `run_with_vllm` for replicas of one and two.
Columns of each case are in OUT_DIR/<case>.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from tensordict import TensorDict

from spmdflow.config.episode import AgentActorConfig, AgentRolloutConfig, EpisodeConfig
from spmdflow.config.objective import PolicyUpdateConfig
from spmdflow.config.schema import DataConfig, EngineConfig, ModelConfig, RunConfig
from spmdflow.controller.batch import Batch
from spmdflow.controller.script import run_flow
from spmdflow.data.ragged import rows_of
from spmdflow.models.generator import GeneratorWorker
from spmdflow.models.policy import ActorWorker
from spmdflow.worker_api.register import map_function
from tests.distributed.programs import episode_env

TASK = Path(__file__).parents[3] / "algos" / "guess"
CASES = {"one": (1, 0), "two": (2, 5)}
"""Ranks, and the seed of the sleeps."""
FOUR = {"four": (4, 6)}
"""The same, as a drill."""
WITH_VLLM = {"vllm": (2, 7, "t1"), "vllm t2": (2, 8, "t2")}
"""Besides, the layout of a replica."""
RAGGED = ("prompts", "responses", "response_mask", "rollout_log_probs", "old_log_probs")
DENSE = ("scores", "valid", "num_turns", "weights_version")


@map_function(reads=("prompts", "responses"), writes=("tool_text",))
def hint(batch: TensorDict) -> dict[str, list[str]]:
    """tool_text: a word to two rows of three, told apart by their tokens."""
    sums = [int(row.sum()) for row in rows_of(batch["responses"])]
    return {"tool_text": [("", "lower", "higher")[number % 3] for number in sums]}


def converse(actor: Any, rows: Batch) -> Batch:
    """Three turns of at most three tokens each."""
    batch = actor.generate_sequences(rows, max_new_tokens=3)
    for _ in range(2):
        going = (batch | batch.map(hint)).where("tool_text")
        batch = batch.replace(actor.generate_sequences(going, max_new_tokens=3))
    return batch


@dataclass
class Config:
    run: RunConfig
    data: DataConfig
    actor: AgentActorConfig
    placement: Any = "colocate"
    total_steps: int = 1
    eval_every: int = 0
    found: dict[str, Any] = field(default_factory=dict)


def main(flow: Any, cfg: Config) -> None:
    trains = cfg.actor.rollout.engine == "builtin"
    role = ActorWorker if trains else GeneratorWorker
    actor = flow.spawn(role, cfg.actor, pool=flow.pool("all"))
    prompts = flow.prompts(cfg.data)
    if not trains:
        actor.load_weights()
    for _ in flow.steps(1):
        rows = next(prompts)
        batch = actor.run_episodes(rows)
        if trains:
            batch |= actor.compute_log_prob(batch)
        names = RAGGED if trains else RAGGED[:-1]
        columns = batch.fetch(*names, *DENSE)
        again = actor.run_episodes(rows).fetch("responses")["responses"]
        for name in names:
            cfg.found[name] = [row.tolist() for row in rows_of(columns[name])]
        for name in DENSE:
            cfg.found[name] = columns[name].tolist()
        cfg.found["again"] = [row.tolist() for row in rows_of(again)]
        turns = converse(actor, rows)
        if trains:
            turns |= actor.compute_log_prob(turns)
        for name, values in turns.fetch(*names).items():
            cfg.found[f"turns {name}"] = [row.tolist() for row in rows_of(values)]


def config_of(case: str, out: Path) -> Config:
    _, sleeps, *layout = (CASES | FOUR | WITH_VLLM)[case]
    environment = f"{episode_env.__file__}:scripted(sleeps={sleeps})"
    engine = {"engine": "vllm", "layout": layout[0]} if layout else {"engine": "builtin"}
    rollout = AgentRolloutConfig(
        **engine,
        max_new_tokens=32,
        max_batch_size=32 if layout else 1,
        max_prompt_tokens=8,
        tokenizer_path=str(TASK / "model"),
        episode=EpisodeConfig(environment, max_turns=8, seconds=600.0),
    )
    data = DataConfig(
        train_path=str(TASK / "train.jsonl"),
        tokenizer_path=str(TASK / "model"),
        prompts_per_step=12,
        samples_per_prompt=2,
    )
    model = ModelConfig(path=str(TASK / "model"))
    update = PolicyUpdateConfig(old_log_probs="recompute")
    actor = AgentActorConfig(model=model, engine=EngineConfig(), rollout=rollout, update=update)
    return Config(RunConfig(dir=str(out / case), sample_every=0), data, actor)


def run_with_vllm(out_dir: str) -> None:
    run_all(out_dir, WITH_VLLM)


def run_all(out_dir: str, cases: Mapping[str, tuple[Any, ...]] = CASES) -> None:
    out = Path(out_dir)
    for case, (num_ranks, *_) in cases.items():
        cfg = config_of(case, out)
        code = run_flow(sys.modules[__name__], cfg, ranks=tuple(range(num_ranks)))
        assert code == 0 or dist.get_rank() >= num_ranks
        if dist.get_rank() == 0:
            (out / f"{case}.json").write_text(json.dumps(cfg.found))
        dist.barrier()
