"""Two reward models, each with a tokenizer of its own, and the sum of their scores.

`SEEN` has what a run gave: on one process a test can read it.
"""

from dataclasses import dataclass
from typing import Any

from tensordict import TensorDict

from spmdflow import ActorWorker, Flow, RewardWorker, map_function, part
from spmdflow.config.schema import ActorConfig, DataConfig, RewardConfig, ScriptConfig

SEEN: list[dict[str, Any]] = []


@dataclass
class Config(ScriptConfig):
    """An actor and its two judges."""

    data: DataConfig = part(DataConfig)
    actor: ActorConfig = part(ActorConfig)
    helpful: RewardConfig = part(RewardConfig)
    harmless: RewardConfig = part(RewardConfig)


@map_function(
    reads=("scores", "token_level_rewards", "harmless_scores", "harmless_token_level_rewards"),
    writes=("scores", "token_level_rewards"),
)
def add(batch: TensorDict, *, reduce: Any, report: Any) -> TensorDict:
    """The sum of both scores, also at the last token."""
    names = ("scores", "token_level_rewards")
    columns = {name: batch[name] + batch[f"harmless_{name}"] for name in names}
    return TensorDict(columns, batch_size=batch.batch_size)


def main(flow: Flow, cfg: Config) -> None:
    """Responses, judged twice."""
    actor = flow.spawn(ActorWorker, cfg.actor)
    helpful = flow.spawn(RewardWorker, cfg.helpful, name="helpful")
    harmless = flow.spawn(RewardWorker, cfg.harmless, name="harmless")
    prompts = flow.prompts(cfg.data)

    for step in flow.steps(cfg.total_steps):
        batch = actor.generate_sequences(next(prompts))
        first = helpful.compute_reward(batch, prefix="helpful")
        second = harmless.compute_reward(batch, prefix="harmless")
        second = second.only("scores", "token_level_rewards", prefix="harmless_")
        both = first | second
        total = both.map(add)
        SEEN.append(
            {
                **batch.fetch("prompts", "responses"),
                "helpful": first.fetch("scores")["scores"],
                "harmless": second.fetch("harmless_scores")["harmless_scores"],
                **total.fetch("scores", "token_level_rewards"),
            }
        )
        step.log(done=1.0)
