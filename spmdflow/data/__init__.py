"""Rows and columns of a batch, as a rank holds them.

A batch is a set of rows with ids unique in a run (held-out rows: unique in an evaluation, the same
in each; `row_id`) and a set of named columns. A column is dense (fixed row shape), ragged (values
and lengths) or text (utf-8 bytes and lengths). The controller knows ids, shapes and lengths; the
values are in each rank's `RowStore` until the controller drops its last reference to them.

| file | what |
|---|---|
| row_id | row ids, and the groups of rows with the same prompt |
| column, ragged | the values of a column; rows of different lengths |
| micro | how many micro-batches some rows need, and which rows go into each |
| shared_prompt | which rows are computed with one copy of the prompt that they share |
| store | the rows that a rank holds |

docs/COLUMNS.md lists all columns; the main ones:

| column | kind | what |
|---|---|---|
| prompts | ragged int64 | token ids of the prompt |
| prompt_text, row | text | the prompt, and the other fields of the data row as JSON |
| responses | ragged int64 | generated token ids, end-of-sequence token included |
| response_mask | ragged bool | True where the policy chose the token |
| rollout_log_probs | ragged float32 | recorded while generating |
| old_log_probs, ref_log_probs | ragged float32 | recomputed by the trainer; by the reference |
| values | ragged float32 | the critic's estimate before each response token |
| token_level_rewards | ragged float32 | the score at the last token, or each token's |
| advantages, returns | ragged float32 | what the policy and the critic learn from |
| rollout_weights | ragged float32 | importance weight of a token that the generator sampled |
| scores | dense float32 (B,) | one score per response |
| baseline_scores | dense float32 (B,) | the score of the greedy response (ReMax) |
| response_text | text | the decoded response |
| tool_calls | text | calls of tools in each reply of an episode, as JSON |
| score_terms | text | the terms of the score, as JSON |

`input_ids` and `position_ids` exist only inside an engine, for one micro-batch (prompt and response
joined, rows end to end).
"""
