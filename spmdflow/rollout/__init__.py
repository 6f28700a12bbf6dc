"""Rollout: generators turn prompts into responses.

A generator needs a Hugging Face folder, sampling settings and one seed per row. For every row it
returns the response's token ids, a mask and the log-probability of each chosen token. Its
*replica*, one rank or several, generates with a full copy of the weights, which `hybrid_engine`
overwrites after each update, or with the trainer's shards in place.

The recorded log-probabilities are those of logits / temperature over the whole vocabulary,
before top-k and top-p: the quantity that the trainer computes for the same token. The trainer
recomputes them nevertheless (`compute_log_prob`), because the two forward passes round
differently. The difference between the two is a metric of every step (rollout/drift).

The ranks of a replica are the trainer's generation groups (parallel.layout), and vLLM works on
their process groups: tensor-parallel t_g, pipeline p_g, strided or not, over any ranks of the job.
Each rank schedules the same requests and draws the same tokens from the same logits and seeds;
prompts and tokens are compared by hash in each call. Pipeline stages are vLLM's own: the last
stage broadcasts its logits. One batch is in one stage at a time, so p_g > 1 saves memory, not
time. The built-in generator supports replicas of one rank only.

Rows come and go one by one (`RequestGenerator`: add, abort, step). `generate` is built on that.
`ResumableRequests` continues requests across weight updates.

  generator      the interface, a replica's ranks and groups, `generator_of`, checks and columns
  sampling       settings and the draw: pure functions of (seed, position, logits)
  grammar        responses that a grammar limits, and the likeliest tokens at each position
  builtin        rows decoded together over a cached forward, refilled as they end
  live_rows      its rows: their requests, and their state on the device
  resumable      requests that continue across weight updates (partial rollouts)
  forward        the interface of a cached forward, and one for any family with transformers
                 (the fast one, for Llama, Mistral, Qwen2 and Qwen3, is cpu.llama)
  row_cache      rows of a cache of transformers: selected, joined, shortened
  vllm           the generator on vLLM in process, one engine per rank
  vllm_engine    starts vLLM's engine inside our process, with our sampler in it
  vllm_process   its parallel state on our groups, and the process state that it changes; CUDA
  vllm_contract  vLLM's internal names that are used, checked before an engine is built
  vllm_weights   the tensors that its layers read, by Hugging Face name, and their hashes
  vllm_derived   the same for families without a table, read off vLLM's own loader
  table_cache    such tables, cached on disk for the next start
  vllm_routes    the experts that its tokens used, on a CPU
  vllm_experts   experts on a CPU, computed with their plain weights
  vllm_adapter   the policy's LoRA adapters in vLLM's buffers
  vllm_tools     vLLM's parsers of tool calls
  vllm_blocks    layers that compute with the trainer's shards instead of their own weights
"""
