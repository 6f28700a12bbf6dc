"""Which models share which devices, and how each is cut: Algorithms 1 and 2 (paper section 6).

Given a `Dataflow` (models, and the calls of one step with their stages) and a `Hardware` file,
`find_mapping` returns the fastest placements: pools with their ranks, a strategy for every model,
predicted seconds of every call by cause. Nothing is run.

    cost = sum over stages of (max over pools of (sum over the pool's calls of that stage))

Algorithm 2 (`dataflow`, `table`): strategies of a model on n ranks are t * p * d = n, t inside a
node, p at most the pool's nodes, and t_g, p_g for generation. Models that share a pool choose
together, because their resident memory adds up and the KV cache gets what is left; a set of models
therefore has a Pareto front of vectors (seconds of each stage). Where a set does not fit otherwise,
parts that may move are in host memory between calls (`residency`). Algorithm 1 (`search`, `auto`):
every set partition of the models and every allocation of ranks not below the memory floor, exactly,
by Pareto fronts and bounds. Ranks may stay idle, and pipeline stages may be uneven.

Complexity: with k models and n pool sizes, Bell(k) partitions, of each of which the bound is linear
in n; exact fronts are made only for pools that could still be part of something cheaper.

Simulators (`seconds`, `memory`; paper Appendix C): FLOPs over the rate of large matrices plus bytes
over the memory's rate, ring collectives over NVLink and a network that the devices of a node share,
pipeline bubbles, gradient traffic once an update, several waves of generation where the KV cache is
short. Coefficients are in `hardware/*.yaml`, each with its source; docs/MAPPING.md compares the
predictions with the paper's placements and with runs.

This package knows no processes, no controller and no engine.
"""
