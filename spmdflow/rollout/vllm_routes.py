"""Which experts of a mixture the tokens of vLLM use, read off its routers.

Each router of vLLM passes on the experts that it selects, one row for each token of a step. They
are written into a buffer of the device, which also works inside of CUDA graphs if the routers know
the buffer before the graphs are captured. After the forward a step's rows are copied to the host,
which does not wait for them, and sorted by request once they have arrived. Tokens of a cached
prefix are not computed a second time: their experts are those of the blocks that vLLM took them
from.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from spmdflow.parallel.device import to_host
from spmdflow.rollout.generator import Request
from spmdflow.router import OWN_CHOICE

_UNDER_WAY = 8
"""Steps whose experts may be on their way: far more than vLLM starts ahead of its results."""
_FULL_ATTENTION = "FullAttentionSpec"
"""Class of vLLM's description of layers whose cache keeps every token of a row."""


@dataclass
class _Rows:
    """Tokens of one request in a step."""

    number: int
    """Of the request."""
    first: int
    stop: int
    """Their positions."""
    slots: Tensor | None
    """(stop - first,) int64: their slots of the KV cache. None: no layer keeps all tokens."""
    cached: Tensor | None
    """(first,) int64: slots of the prefix that a new request found in the cache."""


@dataclass
class _Step:
    """A step whose experts are on their way to the host."""

    routes: Tensor
    """(T, layers, k) int16 on the host, valid once the event has happened."""
    arrived: Any
    """torch.cuda.Event; None on a CPU."""
    rows: list[_Rows]


class VllmRoutes:
    """The experts of all tokens that are being generated, by request."""

    def __init__(self, runner: Any) -> None:
        """runner: vLLM's model runner, with its model and before any graph is captured. Its routers
        write into this object's buffer from now on; `num_layers` is 0 if they cannot."""
        self.num_layers = 0
        self.num_experts = 0
        self._num_chosen = 0
        self._runner = runner
        for module in runner.model.modules():
            router: Any = getattr(module, "router", None)
            if not hasattr(router, "set_capture_fn") or _selects_inside(module):
                continue
            router.set_capture_fn(partial(self._keep, self.num_layers))
            self.num_layers += 1
            self.num_experts = int(router.global_num_experts)
            self._num_chosen = int(router.top_k)
        self._buffer = self.own_routes(runner.max_num_tokens).to(runner.device)
        self._steps = deque[_Step]()
        self._of_request: dict[int, Tensor] = {}
        self._of_slot = torch.zeros(0, dtype=torch.int16)
        """(slots of the KV cache, layers, k), on the host."""

    def own_routes(self, num_tokens: int) -> Tensor:
        """(num_tokens, layers, k) int16: routes by which the trainer's routers select."""
        shape = (num_tokens, self.num_layers, self._num_chosen)
        return torch.full(shape, OWN_CHOICE, dtype=torch.int16)

    def _keep(self, layer: int, experts: Tensor) -> None:
        """Keep the experts (T, k) that a router selected in the step that runs."""
        self._buffer[: len(experts), layer] = experts

    def store(
        self, names: Sequence[str], numbers: Sequence[int], requests: Mapping[int, Request]
    ) -> None:
        """Fetch the experts of the step that has been started.

        names, numbers: vLLM's names and ours of the requests in its batch. requests: by number.
        """
        starts = self._runner.query_start_loc.np
        lengths = _host_lengths(self._runner)
        rows = []
        for row, (name, number) in enumerate(zip(names, numbers, strict=True)):
            stop = int(lengths[row])
            first = stop - int(starts[row + 1] - starts[row])
            cached = None
            if number not in self._of_request:
                request = requests[number]
                size = len(request.prompt) + request.sampling.max_new_tokens
                self._of_request[number] = self.own_routes(size)
                cached = self._slots_of(name, 0, first)
            rows.append(_Rows(number, first, stop, self._slots_of(name, first, stop), cached))
        routes = self._buffer[: int(starts[len(names)])].clone()  # the next step writes there
        arrived = None
        copy = to_host(routes)
        if routes.device.type != "cpu":
            arrived = torch.get_device_module(routes.device).Event()
            arrived.record()
        self._steps.append(_Step(copy, arrived, rows))
        self._sort_steps(remaining=_UNDER_WAY)

    @torch.inference_mode()  # as vLLM's forward is: tensors of both kinds are written here
    def _sort_steps(self, *, remaining: int) -> None:
        """Sort the experts of all steps but the last `remaining` by request and by slot.

        Waits until they have arrived.
        """
        while len(self._steps) > remaining:
            step = self._steps.popleft()
            if step.arrived is not None:
                step.arrived.synchronize()
            begin = 0
            for row in step.rows:
                end = begin + row.stop - row.first
                self._sort_row(row, step.routes[begin:end])
                begin = end

    def _sort_row(self, row: _Rows, routes: Tensor) -> None:
        """Sort the experts (n, layers, k) of a request's tokens in one step."""
        table = self._of_request.get(row.number)
        if table is not None:  # otherwise its response had ended before this step
            if row.cached is not None:
                table[: row.first] = self._slot_table()[row.cached]
            table[row.first : row.stop] = routes
        if row.slots is not None:
            self._slot_table()[row.slots] = routes

    def take(self, number: int, num_tokens: int) -> Tensor | None:
        """Forget a request, and return the experts of its first tokens, (num_tokens, layers, k).

        The last token's are `OWN_CHOICE`, because it was never read. None: no step has run for it.
        """
        self._sort_steps(remaining=0)
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

    def _slots_of(self, name: str, first: int, stop: int) -> Tensor | None:
        """Return the slots of these tokens of a request; None if no layer keeps all tokens."""
        group = self._full_group
        if group is None:
            return None
        size = self._block_size
        begin = first // size
        blocks = self._runner.requests[name].block_ids[group][begin : -(-stop // size)]
        positions = torch.arange(first, stop)
        return torch.tensor(blocks, dtype=torch.int64)[positions // size - begin] * size + (
            positions % size
        )

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


def _selects_inside(module: Any) -> bool:
    """Whether vLLM computes routers and experts in one kernel, which passes nothing on."""
    method = getattr(module, "_quant_method", None)
    return bool(getattr(method, "is_monolithic", False))


def _host_lengths(runner: Any) -> Any:
    """The tokens of each row of the batch after this step, on the host."""
    lengths = getattr(runner, "optimistic_seq_lens_cpu", runner.seq_lens)
    return getattr(lengths, "np", lengths)
