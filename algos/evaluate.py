"""Evaluation of a policy alone: greedy accuracy, pass@k and majority@k with intervals.

pass@k as in Chen et al. 2021 (equation 1), majority@k as in Wang et al. 2023 (self-consistency).
Departures from the papers:
1. intervals: a bootstrap over prompts (1000 resamples, 95 %), derived from run.seed;
2. equally common answers share a prompt's majority@k instead of one being drawn;
3. a sample's random numbers depend only on run.seed, its prompt's line and its number: a run's own
   evaluations sample with the same ones.

    torchrun --nproc-per-node 2 -m spmdflow.run algos/evaluate.py actor.model.path=runs/ppo
"""

from spmdflow import EvaluateConfig, Flow, GeneratorWorker, RewardWorker


def main(flow: Flow, cfg: EvaluateConfig) -> None:
    """The evaluation; runs once, on the controller."""
    generator = flow.spawn(GeneratorWorker, cfg.actor)
    reward = flow.spawn(RewardWorker, cfg.reward)
    prompts = flow.prompts(cfg.data)

    generator.load_weights()

    for step in flow.steps(cfg.total_steps):
        # Stage 1: generation, greedy and sampled
        greedy = generator.generate_sequences(prompts.eval_batch(), greedy=True)
        sampled = generator.generate_sequences(prompts.eval_samples())
        # Stage 2: scoring
        greedy |= reward.compute_reward(greedy, prefix="eval")
        sampled |= reward.compute_reward(sampled, prefix="eval/sampled")
        # Stage 3: estimates, a table and RUN_DIR/evaluation.jsonl
        step.log(flow.report(greedy, sampled))
