"""Which experts vLLM says that its tokens used, next to those of transformers."""

from __future__ import annotations

from typing import Any

import torch

from spmdflow.data.ragged import ragged_from_rows, rows_of
from spmdflow.rollout.sampling import Sampling
from spmdflow.rollout.vllm import VllmGenerator
from spmdflow.router import OWN_CHOICE, ROUTES, Routers, from_column

NUM_TOKENS = 8


def routes_found(generator: VllmGenerator, plain: Any, routers: Routers) -> dict[str, float]:
    """How the experts that vLLM returns are those of transformers, also of a cached prefix.

    generator: built to replay routes. plain: the same model of transformers, on the CPU.

    equal: share of choices, order apart. most_own, least_own: tokens without experts in a row. The
    long prompt is longer than a block of the cache, and in the cache when the second call begins.
    """
    generator.return_routes()
    generator.renew(0)  # no prefix from before
    long = torch.arange(3, 143)
    starts = [long, long, torch.tensor([5, 9, 12])]
    prompts = ragged_from_rows([start.to(generator.device) for start in starts])
    sampling = Sampling(NUM_TOKENS)
    generator.generate(prompts, sampling, [0, 1, 2])
    columns = generator.generate(prompts, sampling, [3, 4, 5])
    equal = 0
    choices = 0
    own = []
    routers.records = True
    responses = rows_of(columns["responses"].cpu())
    rows = zip(starts, responses, rows_of(columns[ROUTES].cpu()), strict=True)
    for prompt, response, routes in rows:
        routers.begin()
        with torch.no_grad():
            plain(input_ids=torch.cat([prompt, response])[None], use_cache=False)
        expected = torch.stack([layer.experts for layer in routers.take()], 1).sort(-1).values
        found = from_column(routes).long().sort(-1).values
        is_own = (found == OWN_CHOICE).any(-1).any(-1)
        own.append(int(is_own.sum()))
        equal += int((found == expected)[~is_own].sum())
        choices += found[~is_own].numel()
    routers.records = False
    return {"equal": equal / choices, "most_own": max(own), "least_own": min(own)}
