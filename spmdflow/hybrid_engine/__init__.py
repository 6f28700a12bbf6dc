"""The hybrid engine: one set of ranks trains and generates, and the weights pass between.

          optimizer steps                     sync
    train ---------------> weights_version n -----> generator at version n ---> generate
      ^                                                                            |
      +------------------------------- next batch --------------------------------+

`copy_sync.CopySync` keeps two copies: the trainer's shards and a full copy in the generator's own
layout. It works with every train engine and every generator. For M bytes of weights (in the
precision named) and n training ranks:

| phase | trainer per rank | generator per rank | moved per rank |
|---|---|---|---|
| train | M32/n, its gradients and moments | M | 0 |
| sync | the same, and one full tensor at a time | M | (n-1)/n M32 in, tensor by tensor |
| generate | M32/n and moments (on the host if offloaded) | M and the KV cache | 0 |

The redundancy is the generator's M; HybridFlow's own engine (paper section 5.3, Table 2) shares
storage and has none where training is sharded over tp and pp.

What moves, and what it costs, is planned on integers before anything runs: `reshard` (boxes from
training ranks to generation ranks, in bounded buckets; whole shards for one copy), `cost` (received,
peak and redundant bytes of five systems, equal to Table 2 where its formulas apply), `amount` (bytes
told apart: sharded weights, replicated norms, a tied copy, padding).
"""
