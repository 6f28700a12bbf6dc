"""DPO: a policy from preferences, without a reward model (Rafailov et al. 2023).

By name (actor.loss.name): dpo, with label_smoothing conservative DPO (Mitchell 2023); ipo (Azar et
al. 2024); slic (Zhao et al. 2023); hinge (Liu et al. 2024); kto, on answers with a label each
(Ethayarajh et al. 2024). docs/ALGORITHMS.md has the formulas.

Departures from the papers:
1. a step scores its pairs once more, without gradient: both answers of a pair need not be in one
   forward, so pairs may be split over micro-batches;
2. AdamW with clipping, where DPO has RMSprop;
3. IPO sums log-probabilities over an answer's tokens, as printed; its authors' runs divide by them
   (actor.loss.per_token=true);
4. SLiC has no term that keeps the policy near its start;
5. KTO's KL is the mean over the mini-batch, each prompt with the answer of the row before it in
   the step; rows of the same prompt should not be neighbours (data.shuffle).

    torchrun --nproc-per-node 2 -m spmdflow.run algos/dpo.py
"""

from spmdflow import AnswerReferenceWorker, DPOConfig, Flow, PreferenceWorker


def main(flow: Flow, cfg: DPOConfig) -> None:
    """The algorithm; runs once, on the controller."""
    actor = flow.spawn(PreferenceWorker, cfg.actor)
    reference = flow.spawn(AnswerReferenceWorker, cfg.reference)
    prompts = flow.prompts(cfg.data)
    flow.evaluate(actor, reference, every=cfg.eval_every)

    for step in flow.steps(cfg.total_steps):
        # Stage 1: pairs, which bring both answers
        batch = next(prompts)
        # Stage 2: preparation
        batch |= reference.compute_ref_log_prob(batch)
        # Stage 3: learning
        step.log(actor.update_actor(batch))
        flow.evaluate(actor, reference, every=cfg.eval_every)
        flow.save(every=cfg.save_every)
