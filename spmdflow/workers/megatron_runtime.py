"""The environment of Megatron-Core: process groups from our layout, and CUDA's names on a CPU.

No global parallel state: several models with different layouts live in one process, each with its
own collection. All groups exist already (the worker's needed_groups); nothing is created here.

On a CPU, the CUDA functions that Megatron calls by name are replaced by CPU ones (checked with
0.16.1 and 0.19.2). Each is an attribute that is restored when the last user leaves. Where CUDA is
available nothing is replaced. Code that does not use CUDA is not affected, so other threads may run
meanwhile. Knows no models.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import distributed_data_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from spmdflow.parallel.group import GroupTable, all_gather_plain
from spmdflow.parallel.layout import Layout

_FACTORIES = ("zeros", "ones", "empty", "tensor", "full")


def process_groups(layout: Layout, rank: int, groups: GroupTable) -> ProcessGroupCollection:
    """Return the process groups of this rank that Megatron uses instead of its global state.

    All groups exist already. Ranks that divide rows are data-parallel ranks for Megatron: they
    divide the optimizer and sum gradients, and its own context parallelism has this rank alone, as
    has expert parallelism of size 1. embd has the first and last stage of a tied embedding,
    otherwise None.
    """
    axis = {}
    for name, own_name in {"tp": "tp", "pp": "pp", "dp": "weights"}.items():
        axis[name] = groups.get(layout.axis_group(rank, own_name))
    model = groups.get(layout.axis_group(rank, "model"))
    alone = groups.get((rank,))
    experts = {"ep": alone, "tp_ep": axis["tp"], "tp_ep_pp": model, "expt_dp": axis["dp"]}
    if layout.expert_size > 1:
        names = {"ep": "ep", "tp_ep": "tp_ep", "tp_ep_pp": "copy", "expt_dp": "expert_dp"}
        for name, own_name in names.items():
            experts[name] = groups.get(layout.axis_group(rank, own_name))
    ends = []
    for group in layout.axis_groups("embedding"):
        if rank in group:
            ends.append(group)
    return ProcessGroupCollection(
        **axis,
        mp=model,
        # first and last stage of a tied embedding; None on the stages between
        embd=groups.get_or_none(ends[0]) if ends and layout.pp_size > 1 else None,
        pos_embd=None,
        # inside an expert, tensors are cut over the same ranks as elsewhere
        **experts,
        expt_tp=axis["tp"],
        intra_expt_dp=experts["expt_dp"],
        cp=alone,
        tp_cp=axis["tp"],
        dp_cp=axis["dp"],
        intra_dp_cp=axis["dp"],
        tp_dp_cp=groups.get(layout.ranks),
        intra_dist_opt=groups.get(layout.ranks),
        inter_dist_opt=None,
    )


@contextmanager
def limit_object_gathers(group: dist.ProcessGroup) -> Iterator[None]:
    """Make dist.all_gather_object use only this group inside the with block, without pickle.

    dist.get_world_size() then returns the group's size. get_megatron_optimizer compares parameter
    groups over the whole world (0.16.1, optimizer/__init__.py), which would wait for ranks that
    have no part in this model. Replaces the functions for the whole process, and restores them on
    exit.
    """
    gather = dist.all_gather_object
    size = dist.get_world_size

    def gather_plain(values: list[Any], mine: Any) -> None:
        values[:] = all_gather_plain(mine, group)

    dist.all_gather_object = gather_plain  # type: ignore[assignment]
    dist.get_world_size = lambda group=group: size(group)
    try:
        yield
    finally:
        dist.all_gather_object = gather
        dist.get_world_size = size


@contextmanager
def megatron_runtime() -> Iterator[None]:
    """Context in which all calls of Megatron run. May be nested and used by several threads.

    Creates Megatron's process-wide state at first use. Without CUDA, the CUDA functions that
    Megatron calls by name are replaced by CPU ones until the last user has left.
    """
    _initialise_process()
    if torch.cuda.is_available():
        yield
        return
    with _LOCK:
        _USERS.append(1)
        if len(_USERS) == 1:
            for owner, name, value in _replacements():
                _ORIGINALS.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, value)
    try:
        yield
    finally:
        with _LOCK:
            _USERS.pop()
            if not _USERS:
                _ORIGINALS.close()


_LOCK = threading.Lock()
_USERS = list[int]()
_ORIGINALS = ExitStack()
"""The users inside `megatron_runtime`, over all threads, and the originals to restore after the
last."""


def _initialise_process() -> None:
    """Create Megatron's scratch memory and random-number tracker, unless they exist already.

    So those of a host program stay. Also filters a repeated line from Megatron's log.
    """
    logging.getLogger(distributed_data_parallel.__name__).addFilter(_is_new_information)
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    tracker = megatron_random.get_cuda_rng_tracker()
    if not (tracker.is_initialized() or getattr(tracker, "is_inference_rng_tracker", False)):
        # no dropout anywhere: a tracker that never forks a stream, made once
        megatron_random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)


def _is_new_information(record: logging.LogRecord) -> bool:
    """False for a line that 0.19 logs for every model: it allocates the buffer itself, as
    before."""
    return "full_param_layout not provided" not in str(record.msg)


def _replacements() -> Iterator[tuple[Any, str, Any]]:
    """Yield (owner, attribute, its replacement on a CPU) for each CUDA function to replace."""
    for name in _FACTORIES:
        yield torch, name, _without_cuda(getattr(torch, name))
    yield Tensor, "type", _type_of(Tensor.type)
    yield Tensor, "cuda", lambda tensor, *_, **__: tensor
    yield torch.cuda, "current_device", lambda: "cpu"
    yield torch.cuda, "current_stream", lambda device=None: None  # 0.19 only looks for events
    yield torch.cuda, "synchronize", lambda device=None: None
    yield torch.cuda, "empty_cache", lambda: None
    yield torch.cuda, "manual_seed", torch.manual_seed
    yield torch.cuda, "get_rng_state", lambda device=None: torch.get_rng_state()
    yield megatron_random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()
    yield megatron_random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)
    yield torch.cuda, "Stream", lambda *_, **__: None  # the experts' dispatcher keeps one
    yield MoEAlltoAllTokenDispatcher, "_maybe_dtoh_and_synchronize", _splits_as_lists
    for name, function in (
        ("_gather_along_first_dim", _gather_uneven),
        ("_reduce_scatter_along_first_dim", _reduce_scatter_uneven),
    ):
        yield mappings, name, function(getattr(mappings, name))


def _gather_uneven(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap Megatron's all-gather of rows so that ranks may have different numbers of them.

    Experts need that. gloo's own all-gather cannot do it; an all-to-all sends the same bytes.
    """

    @functools.wraps(original)
    def gather(
        rows: Tensor, group: dist.ProcessGroup, sizes: list[int] | None = None, *more: Any
    ) -> Tensor:
        if sizes is None or group.size() == 1:
            return original(rows, group, sizes, *more)
        result = rows.new_empty((sum(sizes), *rows.shape[1:]))
        sent = rows.repeat(group.size(), *(1 for _ in rows.shape[1:]))
        dist.all_to_all_single(result, sent, sizes, [len(rows)] * group.size(), group=group)
        return result

    return gather


def _reduce_scatter_uneven(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap Megatron's reduce-scatter of rows in the same way."""

    @functools.wraps(original)
    def reduce_scatter(
        rows: Tensor, group: dist.ProcessGroup, sizes: list[int] | None = None, *more: Any
    ) -> Tensor:
        if sizes is None or group.size() == 1:
            return original(rows, group, sizes, *more)
        own = sizes[group.rank()]
        parts = rows.new_empty((group.size(), own, *rows.shape[1:]))
        dist.all_to_all_single(
            parts.flatten(0, 1), rows.contiguous(), [own] * group.size(), sizes, group=group
        )
        return parts.sum(0)

    return reduce_scatter


def _splits_as_lists(
    dispatcher: Any, point: str, tokens_per_expert: Tensor | None = None
) -> Tensor | None:
    """Return tokens_per_expert, and make the dispatcher's numbers of tokens lists.

    On a GPU, Megatron copies them to the host at this point, in a stream of its own.
    """
    if point == dispatcher.cuda_dtoh_point:
        for name in ("input_splits", "output_splits"):
            splits = getattr(dispatcher, name)
            if isinstance(splits, Tensor):
                setattr(dispatcher, name, splits.tolist())
    return tokens_per_expert


def _without_cuda(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a tensor factory so that a CUDA device in the keyword `device` becomes the CPU."""

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Tensor:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return make


def _type_of(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Tensor.type so that it reports CPU tensors as CUDA ones: torch.cuda.FloatTensor.

    Megatron's optimizers compare this name.
    """

    def type_of(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the result of Tensor.type, with "torch." in a name replaced by "torch.cuda."."""
        result = original(tensor, *args, **kwargs)
        if isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    return type_of
