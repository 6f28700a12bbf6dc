"""GRPO whose weights a vLLM of another program gets after every update."""

from dataclasses import dataclass

from spmdflow import (
    ActorWorker,
    Flow,
    GRPOConfig,
    RewardWorker,
    compute_advantages,
    setting,
)


@dataclass
class Config(GRPOConfig):
    """GRPO's settings and an address."""

    server: str = setting("http://host:port of the vLLM.", "")


def main(flow: Flow, cfg: Config) -> None:
    """The loop, with the two calls that docs/lab/HYBRID.md names."""
    actor = flow.spawn(ActorWorker, cfg.actor)
    reward = flow.spawn(RewardWorker, cfg.reward)
    prompts = flow.prompts(cfg.data)
    actor.connect_server(url=cfg.server)
    for step in flow.steps(cfg.total_steps):
        batch = actor.generate_sequences(next(prompts))
        batch |= actor.compute_log_prob(batch)
        batch |= reward.compute_reward(batch)
        batch |= batch.map(compute_advantages, estimator=cfg.advantage.estimator, cfg=cfg.advantage)
        step.log(actor.update_actor(batch))
        actor.publish_weights()
        flow.save(every=cfg.save_every)
