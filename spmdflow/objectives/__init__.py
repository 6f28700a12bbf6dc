"""Losses, advantages and their parts as pure functions: formula and source in each docstring.

Shapes: B rows, T positions of prompt + response, R response tokens, V words of the vocabulary.
Response-shaped tensors are (B, R) with a bool mask that is True where the policy chose the token;
places outside the mask (padding, observations, tool output) never reach a result, whatever they
hold. Log-probabilities are float32, of logits / temperature. Means are taken over *global*
denominators, so a result does not depend on how rows are spread over ranks and micro-batches.

Algorithms choose by name: `KL_ESTIMATORS`, `AGGREGATIONS`, `ADVANTAGE_ESTIMATORS`.
"""
