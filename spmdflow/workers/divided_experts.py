"""Expert parallelism for models of transformers: each rank has some of a layer's experts.

The e ranks of a group have 1/e of the experts each, complete. They send each other the hidden
states of the tokens that their routers have chosen an expert for, and get the results back:
two all-to-alls in each forward, and two in each backward (GShard, Lepikhin et al. 2020). The
weights with which a token's results are summed stay where the token is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spmdflow.derivative import apply_linear
from spmdflow.errors import ConfigError
from spmdflow.workers.model import LoadedModel

SHARE = "expert_share"
"""Attribute of a module of divided experts."""


@dataclass(frozen=True)
class ExpertShare:
    """Which of a layer's experts the parameters of a module on this rank have."""

    first: int
    num_experts: int
    """Of the layer, on all ranks."""


@dataclass
class ExpertTraffic:
    """What a rank has sent to the experts of other ranks, and back."""

    num_bytes: int = 0


def divide_experts(
    model: LoadedModel, *, rank: int, group: dist.ProcessGroup, traffic: ExpertTraffic
) -> list[nn.Module]:
    """Leave this rank its experts of every layer, and return the modules that hold them.

    rank: position in the group, whose ranks divide the experts. traffic: counts what forwards and
    backwards send from then on. Called before the module is
    sharded. ConfigError if the model's experts are not in modules of transformers with one tensor
    for all experts, or if the ranks do not divide their number.
    """
    modules = [part for part in model.module.modules() if _holds_experts(part)]
    num_routers = 0 if model.routers is None else model.routers.num_layers
    if len(modules) != num_routers or not modules:
        raise ConfigError.of(
            "engine.layout",
            f"e{group.size()} for a model with {len(modules)} modules that hold experts and "
            f"{num_routers} routers",
            "a mixture whose experts transformers keeps in one tensor a layer",
            "remove e",
        )
    for module in modules:
        _keep_own_experts(module, _Peers(rank, group, traffic))
    return modules


def _holds_experts(part: nn.Module) -> bool:
    """Whether a module has tensors of all experts of a layer, and an implementation to choose."""
    if not hasattr(part, "is_transposed") or not hasattr(part, "num_experts"):
        return False
    own = list(part.parameters(recurse=False))
    return bool(own) and all(tensor.shape[0] == part.num_experts for tensor in own)


@dataclass(frozen=True)
class _Peers:
    """The ranks that divide the experts, and their all-to-alls of rows."""

    rank: int
    """Position in the group."""
    group: dist.ProcessGroup
    traffic: ExpertTraffic

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.group.size()

    def all_to_all(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send the first sent[0] rows to the group's first rank, and so on; return what arrives."""
        result = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(result, rows.contiguous(), received, sent, group=self.group)
        leaving = sum(sent) - sent[self.rank]
        self.traffic.num_bytes += leaving * rows.shape[1] * rows.itemsize
        return result


def _keep_own_experts(module: Any, peers: _Peers) -> None:
    """Cut a module's parameters, and replace its forward by one that exchanges tokens."""
    total: int = module.num_experts
    if total % peers.size:
        raise ConfigError.of(
            "engine.layout",
            f"e{peers.size} for {total} experts",
            "a divisor of their number",
            "choose another e",
        )
    own = total // peers.size
    first = peers.rank * own
    for name, parameter in list(module.named_parameters(recurse=False)):
        part = parameter.detach()[first : first + own].clone()
        setattr(module, name, nn.Parameter(part, requires_grad=parameter.requires_grad))
    module.num_experts = own
    setattr(module, SHARE, ExpertShare(first, total))
    compute = module.forward

    def forward(hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        return _run_where_the_experts_are(compute, hidden, experts, weights, own, peers)

    module.forward = forward


def _run_where_the_experts_are(
    compute: Callable[[Tensor, Tensor, Tensor], Tensor],
    hidden: Tensor,
    experts: Tensor,
    weights: Tensor,
    num_own: int,
    peers: _Peers,
) -> Tensor:
    """Return the weighted sum of each token's experts: (T, H) -> (T, H).

    experts, weights: (T, k) of each token. compute: runs the num_own experts of this rank. All
    ranks of the group call it together.
    """
    num_chosen = experts.shape[1]
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)
    to_each = chosen.new_zeros(num_own * peers.size)
    to_each.scatter_add_(0, chosen, torch.ones_like(chosen))
    from_each = torch.empty_like(to_each)
    dist.all_to_all_single(from_each, to_each, group=peers.group)
    sent = to_each.view(-1, num_own).sum(1).tolist()
    received = from_each.view(-1, num_own).sum(1).tolist()
    rows = _send_rows(hidden[order // num_chosen], sent, received, peers)
    own_ids = torch.arange(num_own, device=experts.device).repeat(peers.size)
    own_ids = own_ids.repeat_interleave(from_each, output_size=sum(received))
    results = _compute_rows(compute, rows, own_ids)
    back = _send_rows(results, received, sent, peers)
    positions = torch.empty_like(order)
    positions[order] = torch.arange(len(order), device=order.device)
    each = back[positions].unflatten(0, (-1, num_chosen))
    return (each * weights[..., None].to(each.dtype)).sum(1)


def _compute_rows(
    compute: Callable[[Tensor, Tensor, Tensor], Tensor], rows: Tensor, experts: Tensor
) -> Tensor:
    """Run rows (n, H), each with one expert (n,). One row of zeros is added: n may be 0."""
    rows = nn.functional.pad(rows, (0, 0, 0, 1))
    experts = nn.functional.pad(experts, (0, 1))
    ones = torch.ones(len(rows), 1, dtype=rows.dtype, device=rows.device)
    return compute(rows, experts[:, None], ones)[:-1]


def _send_rows(rows: Tensor, sent: list[int], received: list[int], peers: _Peers) -> Tensor:
    """An all-to-all of rows with gradients, which go the way back; see `_Peers.all_to_all`."""
    forth = partial(peers.all_to_all, sent=sent, received=received)
    back = partial(peers.all_to_all, sent=received, received=sent)
    return apply_linear(rows, forth, back)
