"""PPO with roles of the user's own: a critic written here on FSDP, the given actor on ZeRO 3."""

from collections.abc import Mapping

from spmdflow import (
    ActorWorker,
    Flow,
    FSDPWorker,
    PPOConfig,
    ReferenceWorker,
    RewardWorker,
    ZeROWorker,
    compute_advantages,
    register,
)

READS = ("prompts", "responses", "response_mask")


class MyCritic(FSDPWorker):
    """A critic without value clipping."""

    role = "critic"

    def __init__(self, cfg, context):
        super().__init__(cfg, context, head="critic")

    @register(transfer_mode="3D_PROTO", reads=READS, writes=("values",))
    def compute_values(self, batch):
        """The value before each response token."""
        return self.score(
            batch, lambda output, micro: {"values": micro.spread(output.at(micro.predicting))}
        )

    @register(transfer_mode="3D_PROTO", reads=(*READS, "returns"), minibatches=True)
    def update_critic(self, batch):
        """A step on the squared error for each mini-batch."""
        return self.train(batch, SquaredError(), prefix="critic")


class SquaredError:
    """Token mean of (V - R)^2 / 2."""

    def denominators(self, batch):
        """The policy's tokens on this rank."""
        return {"tokens": float(batch["response_mask"].values().sum())}

    def __call__(self, output, micro, totals: Mapping[str, float]):
        """(loss, metrics) of one micro-batch."""
        errors = (micro.spread(output.at(micro.predicting)) - micro.columns["returns"]).square() / 2
        loss = errors.where(micro.response_mask, 0.0).sum() / totals["tokens"]
        return loss, {"critic/loss": loss.detach()}

    def finalize(self, metrics):
        """Nothing to add."""
        return metrics


class MyActor(ZeROWorker, ActorWorker):
    """The given actor, bound to ZeRO."""


def main(flow: Flow, cfg: PPOConfig) -> None:
    """PPO's loop."""
    actor = flow.spawn(MyActor, cfg.actor)
    critic = flow.spawn(MyCritic, cfg.critic)
    reference = flow.spawn(ReferenceWorker, cfg.reference)
    reward = flow.spawn(RewardWorker, cfg.reward)
    prompts = flow.prompts(cfg.data)

    for step in flow.steps(cfg.total_steps):
        batch = actor.generate_sequences(next(prompts))
        batch |= actor.compute_log_prob(batch)
        batch |= critic.compute_values(batch)
        batch |= reference.compute_ref_log_prob(batch)
        batch |= reward.compute_reward(batch)
        batch |= batch.map(compute_advantages, estimator=cfg.advantage.estimator, cfg=cfg.advantage)
        step.log(critic.update_critic(batch), actor.update_actor(batch))
