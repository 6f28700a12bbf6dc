"""Which experts of a mixture the tokens of vLLM use, read off its routers on a CPU.

Each router of vLLM passes on the experts that it selects, one row for each token of a step. A
request's tokens are found by vLLM's own batch. Tokens of a cached prefix are not computed a second
time: their experts are those of the blocks that vLLM took them from.

On devices vLLM captures graphs, in which such a function does not run; its own option
(enable_return_routed_experts) is not used yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from spmdflow.rollout.generator import Request
from spmdflow.router import OWN_CHOICE

_FULL_ATTENTION = "FullAttentionSpec"
"""Class of vLLM's description of layers whose cache keeps every token of a row."""


class VllmRoutes:
    """The experts of all tokens that are being generated, by request."""

    def __init__(self, runner: Any) -> None:
        """runner: vLLM's model runner. Its routers call this object from now on."""
        self.num_layers = 0
        self.num_experts = 0
        self._num_chosen = 0
        self._runner = runner
        for module in runner.model.modules():
            router: Any = getattr(module, "router", None)
            if hasattr(router, "set_capture_fn"):
                router.set_capture_fn(partial(self._keep, self.num_layers))
                self.num_layers += 1
                self.num_experts = int(router.global_num_experts)
                self._num_chosen = int(router.top_k)
        self._step: dict[int, Tensor] = {}
        self._of_request: dict[int, Tensor] = {}
        self._of_slot = torch.zeros(0, dtype=torch.int16)
        """(slots of the KV cache, layers, k)."""

    def own_routes(self, num_tokens: int) -> Tensor:
        """(num_tokens, layers, k) int16: routes by which the trainer's routers select."""
        shape = (num_tokens, self.num_layers, self._num_chosen)
        return torch.full(shape, OWN_CHOICE, dtype=torch.int16)

    def _keep(self, layer: int, experts: Tensor) -> None:
        """Keep the experts (T, k) that a router selected in the step that runs."""
        self._step[layer] = experts.to(torch.int16)

    def store(
        self, names: Sequence[str], numbers: Sequence[int], requests: Mapping[int, Request]
    ) -> None:
        """Sort the experts of the step that has run by request.

        names, numbers: vLLM's names and ours of the requests in its batch. requests: by number.
        """
        layers = [self._step[layer] for layer in range(self.num_layers)]
        routes = torch.stack(layers, 1)  # (T, layers, k)
        runner = self._runner
        starts = runner.query_start_loc.np
        lengths = getattr(runner.seq_lens, "gpu", runner.seq_lens)
        for row, (name, number) in enumerate(zip(names, numbers, strict=True)):
            rows = routes[int(starts[row]) : int(starts[row + 1])]
            stop = int(lengths[row])
            first = stop - len(rows)
            slots = self._slots_of(name, stop)
            if number not in self._of_request:
                request = requests[number]
                table = self.own_routes(len(request.prompt) + request.sampling.max_new_tokens)
                if slots is not None:
                    table[:first] = self._slot_table()[slots[:first]]
                self._of_request[number] = table
            self._of_request[number][first:stop] = rows
            if slots is not None:
                self._slot_table()[slots[first:]] = rows

    def take(self, number: int, num_tokens: int) -> Tensor | None:
        """Forget a request, and return the experts of its first tokens, (num_tokens, layers, k).

        The last token's are `OWN_CHOICE`, because it was never read. None: no step has run for it.
        """
        table = self._of_request.pop(number, None)
        if table is None:
            return None
        table = table[:num_tokens].clone()
        table[-1] = OWN_CHOICE
        return table

    def _slot_table(self) -> Tensor:
        """The experts by slot of the KV cache; made at first use, all `OWN_CHOICE`."""
        if not len(self._of_slot):
            num_slots = self._runner.kv_cache_config.num_blocks * self._block_size
            self._of_slot = self.own_routes(num_slots)
        return self._of_slot

    def _slots_of(self, name: str, num_tokens: int) -> Tensor | None:
        """Return the slots of the first tokens of a request; None if no layer keeps all tokens."""
        group = self._full_group
        if group is None:
            return None
        blocks = torch.tensor(self._runner.requests[name].block_ids[group])
        positions = torch.arange(num_tokens)
        size = self._block_size
        return blocks[positions // size] * size + positions % size

    @property
    def _full_group(self) -> int | None:
        """Index of vLLM's group of layers whose cache keeps every token."""
        for index, group in enumerate(self._runner.kv_cache_config.kv_cache_groups):
            if type(group.kv_cache_spec).__name__ == _FULL_ATTENTION:
                return index
        return None

    @property
    def _block_size(self) -> int:
        group = self._full_group
        assert group is not None
        spec = self._runner.kv_cache_config.kv_cache_groups[group].kv_cache_spec
        return int(spec.block_size)
