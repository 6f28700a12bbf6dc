"""Roles: what a model does in the dataflow, written once over the engine surface.

| role | primitives (paper Table 4) | transfer mode |
|---|---|---|
| `ActorWorker` | generate_sequences | 3D_ALL_MICRO_DP |
| | compute_log_prob, compute_loss, update_actor | 3D_PROTO |
| `GeneratorWorker` | generate_sequences, with weights it is sent or reads | 3D_ALL_MICRO_DP |
| | begin_sequences, finish_sequences, the same of episodes | 3D_ALL_MICRO_DP |
| `CriticWorker` | compute_values, update_critic | 3D_PROTO |
| `ReferenceWorker` | compute_ref_log_prob | 3D_PROTO |
| `RewardWorker` | compute_reward | 3D_PROTO |
| `CostWorker` | compute_cost | 3D_PROTO |
| `SupervisedWorker` | compute_loss, update_actor | 3D_PROTO |
| `RewardModelWorker` | compute_preference, update_reward_model | 3D_PROTO |
| `CostCriticWorker` | compute_cost_values, update_cost_critic | 3D_PROTO |

| file | what |
|---|---|
| base | what roles with a train engine share |
| policy, critic, reward, preference | the roles above |
| generator | generation on ranks of its own, and what it shares with the actor |
| ahead | rows that a generator draws ahead of the steps that learn from them |
| turn, episode | another turn of a response; conversations with an environment |
| frozen | the weights of other models that these conversations call |
| rows | rows of data -> the rows of prompt and response that engines read |
"""
