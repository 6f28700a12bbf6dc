"""Rollout: what turns prompts into responses.

A generator needs a Hugging Face folder, sampling settings and one seed per row; it gives, for
every row, the response's token ids, a mask and the log-probability of each chosen token. It
holds its own full copy of the weights, which `hybrid_engine` overwrites after each update.

The recorded log-probabilities are those of logits / temperature over the whole vocabulary,
before top-k and top-p: the quantity that the trainer computes for the same token. They are
recomputed by the trainer all the same (`compute_log_prob`), because the two forward passes
round differently; the gap between the two, the drift, is a metric of every step.

  generator      the surface, and what every generator checks and gives
  factory        `generator_of`: a generator by its name in the config
  sampling       settings, noise and the draw: pure functions of (seed, position, logits)
  builtin        the batched decode loop, used with one of the two cached models
  llama          cached forward of Llama-family weights, written for small models on CPU
  hugging_face   the seam to transformers, and the cached forward of every other family
  vllm           the generator on vLLM in process, one engine per rank
  vllm_engine    the seam to vLLM: its engine inside our process and process groups
  process_state  keeping the process as it is while vLLM starts in it
  vllm_weights   vLLM's parameters under their Hugging Face names
"""
