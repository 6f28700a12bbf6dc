"""Losses, advantages and their parts as pure functions: formula and source in each docstring.

Shapes: B rows, T positions of prompt + response, R response tokens, V vocabulary size.
Response-shaped tensors are (B, R) with a bool mask that is True where the policy chose the token;
places outside the mask (padding, observations, tool output) never reach a result, whatever they
hold. Log-probabilities are float32, of logits / temperature. Means are taken over *global*
denominators, so a result does not depend on how rows are spread over ranks and micro-batches.

Settings choose by name: advantages (`@advantage`), losses (`@policy_loss`, `@preference_loss`), to
which a script may add its own, and `KL_ESTIMATORS`, `AGGREGATIONS`, `CORRECTIONS`.

| advantage | baseline | source |
|---|---|---|
| gae | the critic | Schulman et al. 2016 |
| grpo, dr_grpo | mean of the prompt's samples, with and without division by their std | Shao et al. 2024, Liu et al. 2025 |
| rloo | mean of the prompt's other samples | Ahmadian et al. 2024 |
| opo | mean of the prompt's samples, weighted by length | Hao et al. 2025 |
| pass_at_k | best of k samples without this one | Walder and Karkhanis 2025 |
| remax | score of the greedy response | Li et al. 2024 |
| reinforce_pp, reinforce_pp_baseline | whitening over the global batch; before it the mean of the prompt's samples | Hu 2025 |

| policy loss | per token | source |
|---|---|---|
| ppo | clipped ratio; clip-higher, dual clip | Schulman et al. 2017, Yu et al. 2025, Ye et al. 2020 |
| gspo | the same with the sequence's ratio | Zheng et al. 2025 |
| cispo | log-probability weighted by the clipped ratio | MiniMax 2025 |
| plain | log-probability | Williams 1992 |
"""  # noqa: E501 a table row is one line
