"""Losses, advantages and their parts as pure functions: formula and source in each docstring.

Shapes: B rows, T positions of prompt + response, R response tokens, V vocabulary size.
Response-shaped tensors are (B, R) with a bool mask that is True where the policy chose the token;
values outside the mask (padding, observations, tool output) never affect a result. Log-probabilities
are float32 and belong to logits / temperature. Means have *global* denominators, so a result does
not depend on how rows are spread over ranks and micro-batches.

Settings select these functions by name: advantages (`@advantage`) and losses (`@policy_loss`,
`@preference_loss`), to which a script may add its own, and the entries of `KL_ESTIMATORS`,
`AGGREGATIONS` and `CORRECTIONS`.

| file | what |
|---|---|
| estimator, advantage | advantage estimators by name; the map functions that apply them |
| surrogate, policy | policy losses by name; the loss of an update |
| covariance | tokens marked for kl_cov and clip_cov |
| segments | rows of an episode's segments, cut from the columns of the episode |
| kl | KL estimates, an adaptive weight, importance weights |
| preference, supervised | losses of pairs and labels; cross-entropy of given text |
| balance | how evenly the experts of a mixture are used; the loss that evens them |
| log_prob | log-probabilities and entropies without a (tokens, V) tensor |
| loss | what losses share: masks, means with global denominators |

| advantage | baseline | source |
|---|---|---|
| gae | the critic | Schulman et al. 2016 |
| grpo, dr_grpo | mean of the prompt's samples, with and without division by their std | Shao et al. 2024, Liu et al. 2025 |
| rloo | mean of the prompt's other samples | Ahmadian et al. 2024 |
| opo | mean of the prompt's samples, weighted by length | Hao et al. 2025 |
| gpg | mean of the prompt's samples; scaled by the share of rows with a gradient | Chu et al. 2025 |
| pass_at_k, pass_at_k_std | best of k samples without this one; divided by the prompt's std | Walder and Karkhanis 2025, Tang et al. 2025 |
| optimal_token_baseline | returns of the prompt's samples, weighted by squared gradients up to the token | Li et al. 2026 |
| remax | score of the greedy response | Li et al. 2024 |
| reinforce_pp, reinforce_pp_baseline | whitening over the global batch; before it the mean of the prompt's samples | Hu 2025 |

| policy loss | per token | source |
|---|---|---|
| ppo | clipped ratio; clip-higher, dual clip | Schulman et al. 2017, Yu et al. 2025, Ye et al. 2020 |
| gspo | the same with the sequence's ratio | Zheng et al. 2025 |
| cispo | log-probability weighted by the clipped ratio | MiniMax 2025 |
| gmpo | the geometric mean of a row's clipped ratios | Zhao et al. 2025 |
| sapo | a sigmoid of the ratio | Gao et al. 2025 |
| dppo_tv, dppo_kl | log-probability weighted by the ratio, where the probability has not moved far | Qi et al. 2026 |
| dro | log-probability and its squared distance | Richemond et al. 2024 |
| kl_cov, clip_cov | ratio; tokens of large covariance get a KL penalty or no gradient | Cui et al. 2025 |
| plain | log-probability | Williams 1992 |
"""  # noqa: E501 a table row is one line
