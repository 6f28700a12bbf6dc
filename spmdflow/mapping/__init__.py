"""Which models share which devices, and how each is cut: Algorithms 1 and 2 (paper section 6).

Given a `Dataflow` (models, and the calls of one step with their stages) and a `Hardware` file,
`find_mapping` returns the fastest placements: pools with their ranks, a strategy for every model,
and predicted seconds of every call by cause. It runs nothing.

    cost = sum over stages of (max over pools of (sum over the pool's calls of that stage))

Algorithm 2 (`dataflow`, `table`): strategies of a model on n ranks satisfy t * p * d = n, with t
inside a node, p at most the pool's number of nodes, and t_g, p_g for generation. The models of a
pool choose their strategies together, because their resident memory adds up and the KV cache gets
the rest. A set of models therefore has a Pareto front of vectors (seconds of each stage). If a set
does not fit, parts that may move are kept in host memory between calls (`residency`).

Algorithm 1 (`search`, `partition_search`): searches all set partitions of the models and all
allocations of ranks above the memory floor, exactly, by Pareto fronts and bounds. Ranks may stay
idle, and pipeline stages may be uneven.

Complexity: with k models and n pool sizes there are Bell(k) partitions. The bound of each is linear
in n. Exact fronts are computed only for pools that could still be part of a cheaper placement.

Simulators (`seconds`, `memory`, `pass_memory`; paper Appendix C) model: FLOPs over the rate of
large matrices plus bytes over the memory's rate; ring collectives over NVLink and a network that
the devices of a node share (`collective`); messages of attention where ranks divide rows
(`context`); the weights that a rank has (`share`); pipeline bubbles;
gradient traffic once an update; several waves of generation if the KV cache is small. Coefficients
are in `hardware/*.yaml`, each with its source. docs/lab/MAPPING.md compares the predictions with
the paper's placements and with runs. `unequal` takes rows of different lengths, for one strategy.
`shared_prompt` counts tokens where samples of a prompt share it: the paper's data flows have one
row for each prompt.

`placed` describes the resulting placements, and explains why the best one wins.

This package knows no processes, no controller and no engine.
"""
