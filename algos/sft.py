"""Supervised fine-tuning on prompts with responses, or conversations (Ouyang et al. 2022).

Departures from the paper:
1. the loss is the mean over all learnt tokens, so long answers weigh more than short ones;
2. no dropout, as everywhere here (the paper: 0.2);
3. the bundled examples are sums with answers, and the model has been pre-trained on such text.

    torchrun --nproc-per-node 2 -m spmdflow.run algos/sft.py
"""

from spmdflow import Flow, SFTConfig, SupervisedWorker


def main(flow: Flow, cfg: SFTConfig) -> None:
    """The algorithm; runs once, on the controller."""
    actor = flow.spawn(SupervisedWorker, cfg.actor)
    prompts = flow.prompts(cfg.data)
    flow.evaluate(actor, every=cfg.eval_every)

    for step in flow.steps(cfg.total_steps):
        # Stage 1: examples, which bring their responses
        batch = next(prompts)
        # Stage 3: learning
        step.log(actor.update_actor(batch))
        flow.evaluate(actor, every=cfg.eval_every)
        flow.save(every=cfg.save_every)
