"""What a run writes about itself, and what it shows while it runs.

Files in RUN_DIR, each readable at any moment, also after a kill:

    metrics.jsonl   one object per step: `step` first, then names in order; null: not finite
    samples.jsonl   one object per sample: step, texts, score, perhaps terms; group, advantage and
                    tokens (controller/sample.py)
    trace.json      Chrome trace format (open in ui.perfetto.dev): process = rank, thread = lane
    profile/        torch.profiler's traces, one for each step and rank of run.profile_steps
    evaluation.jsonl   of algos/evaluate.py: one object per held-out prompt and its judged responses

Metric prefixes: reward/ eval/ actor/ critic/ rollout/ time/ (seconds) perf/ transfer/ (bytes)
controller/ (bytes); all metrics are in docs/METRICS.md. `merge` turns the Mean, Sum, Max and Min of
many ranks and calls into numbers.
`reading` reads RUN_DIR for people: spmdflow.view, report and status.
`guard` says which conditions of run.guards hold for a step's metrics.
`estimate` turns judged samples of held-out prompts into pass@k and majority@k with intervals.
"""
