"""Records of a run: metrics, samples, traces and what the terminal shows.

Files in RUN_DIR. Each can be read at any moment, even after the run was killed:

    metrics.jsonl   one object per step: `step` first, then names in order; null: not finite
    samples.jsonl   one object per sample: step, texts, score, terms if any; group, advantage and
                    tokens (controller/sample.py)
    calls.jsonl     one object per call: what was called where, on which rows, when it ran
    throughput.jsonl   one object per step: its tokens (controller/throughput_log.py)
    launches.jsonl     one object per start: command, versions, devices, models (the same file)
    trace.json      Chrome trace format (open in ui.perfetto.dev): process = rank, thread = lane
    profile/        torch.profiler's traces, one for each step and rank of run.profile_steps
    servers/        what ranks report about generation servers, one file for each such rank
    evaluation.jsonl   by algos/evaluate.py: one object per held-out prompt, with scored responses

Metric prefixes: reward/ eval/ actor/ critic/ rollout/ time/ (seconds) perf/ transfer/ (bytes)
controller/ (bytes). docs/METRICS.md lists all metrics.

| file | what |
|---|---|
| `tracker` | `Tracker`: writes metrics.jsonl and samples.jsonl; `Sink`: a further destination |
| `summary_table` | a table of runs: state, settings that differ, last metrics |
| `sink` | sinks: TensorBoard, W&B, MLflow, Trackio, SwanLab |
| `prometheus` | the families of metrics of the page for Prometheus, and their text |
| `scrape` | `ScrapeServer`: a thread that serves this page |
| `servers` | reads and writes RUN_DIR/servers |
| `metric` | `merge`: Mean, Sum, Max and Min of many ranks and calls become numbers |
| `trace` | writes trace.json and profile/ |
| `call_log` | writes calls.jsonl |
| `progress` | the line of a step, a table of samples, a curve, as text |
| `reading` | reads a RUN_DIR for spmdflow.view, report, throughput and status |
| `guard` | which conditions of run.guards hold for a step's metrics |
| `estimate` | pass@k and majority@k with intervals, from scored samples of held-out prompts |
| `origin` | command line, versions of packages, git commits |
"""
