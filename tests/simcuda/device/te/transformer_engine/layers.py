"""The five classes of TransformerEngine that Megatron's dense layers use, as plain torch modules.

Names, order and attributes of parameters, shapes, communication and the optimizer's state are
TransformerEngine's (2.9); kernels, quantisation and overlap are not. Where the real class is strict
(attention's heads, modules born on the meta device), so is this one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

Group = dist.ProcessGroup | None


class _Communicate(torch.autograd.Function):
    """forward(x) ahead and backward(gradient) back, each a function of (tensor, group)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ahead: Any, back: Any, group: Group) -> Tensor:
        ctx.back = back
        ctx.group = group
        return ahead(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.back(gradient, ctx.group), None, None, None


def _kept(x: Tensor, group: Group) -> Tensor:
    return x


def _summed(x: Tensor, group: Group) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


def _gathered(x: Tensor, group: Group) -> Tensor:
    """(T/t, ...) -> (T, ...)"""
    whole = x.new_empty(len(x) * dist.get_world_size(group), *x.shape[1:])
    dist.all_gather_into_tensor(whole, x.contiguous(), group=group)
    return whole


def _scattered(x: Tensor, group: Group) -> Tensor:
    """(T, ...) -> (T/t, ...), summed."""
    part = x.new_empty(len(x) // dist.get_world_size(group), *x.shape[1:])
    dist.reduce_scatter_tensor(part, x.contiguous(), group=group)
    return part


class _Module(nn.Module):
    """Parameters that are initialised where they are made, unless that is the meta device."""

    def _add(self, name: str, size: tuple[int, ...], initialise: Any, **where: Any) -> None:
        self.register_parameter(name, nn.Parameter(torch.empty(size, **where)))
        self._initialise = {**getattr(self, "_initialise", {}), name: initialise}

    def reset_parameters(self) -> None:
        """Fill and mark all parameters; those of the meta device are made on the current one."""
        for name, parameter in list(self.named_parameters(recurse=False)):
            if parameter.is_meta:
                parameter = nn.Parameter(torch.empty_like(parameter, device="cuda"))
                setattr(self, name, parameter)
            with torch.no_grad():
                self._initialise[name](parameter)
            for key, value in self._marks(name).items():
                setattr(parameter, key, value)

    def _marks(self, name: str) -> dict[str, Any]:
        """Attributes of a parameter that Megatron reads."""
        raise NotImplementedError


def _rms_norm(x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool) -> Tensor:
    """x / rms(x) * weight, all in float32."""
    wide = x.float()
    gamma = weight.float() + 1 if zero_centered else weight.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * gamma).to(x.dtype)


class RMSNorm(_Module):
    """TransformerEngine's RMSNorm."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        device: Any = "cuda",
    ) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        self.sequence_parallel = sequence_parallel
        first = nn.init.zeros_ if zero_centered_gamma else nn.init.ones_
        self._add("weight", (hidden_size,), first, device=device, dtype=params_dtype)
        if device != "meta":
            self.reset_parameters()

    def _marks(self, name: str) -> dict[str, Any]:
        return {"sequence_parallel": self.sequence_parallel}

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden_size) -> the same."""
        return _rms_norm(x, self.weight, self.eps, zero_centered=self.zero_centered_gamma)


class Linear(_Module):
    """TransformerEngine's Linear: the whole of a weight, or its rows or columns of one rank."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Group = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "cuda",
        ub_name: str | None = None,
        symmetric_ar_type: str | None = None,
    ) -> None:
        super().__init__()
        assert not fuse_wgrad_accumulation, "no kernel for it"
        assert parallel_mode in ("column", "row", None), parallel_mode
        self.tp_size = tp_size
        self.tp_group = tp_group
        self.parallel_mode = parallel_mode
        self.return_bias = return_bias
        self.use_bias = bias
        self.apply_bias = bias and not return_bias
        self.sequence_parallel = tp_size > 1 and sequence_parallel
        rows = out_features // tp_size if parallel_mode == "column" else out_features
        columns = in_features // tp_size if parallel_mode == "row" else in_features
        self.in_features = columns
        self.out_features = rows
        self._fork = get_rng_state_tracker() if get_rng_state_tracker is not None else None
        where = {"device": device, "dtype": params_dtype}
        self._add_norm(in_features, **where)
        self._add("weight", (rows, columns), self._filled(init_method), **where)
        if bias:
            self._add("bias", (rows,), nn.init.zeros_, **where)
        else:
            self.bias = torch.empty(0, **where)
        if device != "meta":
            self.reset_parameters()

    def _add_norm(self, size: int, **where: Any) -> None:
        """A norm's parameter comes before the others; here there is none."""

    def _filled(self, init_method: Callable[[Tensor], Any] | None) -> Callable[[Tensor], Any]:
        def fill(weight: Tensor) -> None:
            with self._fork.fork() if self._fork is not None else nullcontext():
                (init_method or (lambda x: nn.init.normal_(x, 0.0, 0.023)))(weight)

        return fill

    def _marks(self, name: str) -> dict[str, Any]:
        row = self.parallel_mode == "row"
        if name == "bias" and row:
            return {"sequence_parallel": self.sequence_parallel}
        if name == "bias" and self.parallel_mode is None:
            return {}
        dim = 1 if row else 0
        return {"tensor_model_parallel": True, "partition_dim": dim, "partition_stride": 1}

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """(T, b, in) -> (T, b, out), of all ranks' sequence or of this one's; bias if asked for."""
        shared = self.tp_size > 1
        if shared and self.parallel_mode == "column":
            ahead, back = (_gathered, _scattered) if self.sequence_parallel else (_kept, _summed)
            x = _Communicate.apply(x, ahead, back, self.tp_group)
        row = self.parallel_mode == "row"
        bias = self.bias if self.apply_bias else None
        y = functional.linear(x, self.weight.to(x.dtype), None if row else bias)
        if shared and row:
            ahead, back = (_scattered, _gathered) if self.sequence_parallel else (_summed, _kept)
            y = _Communicate.apply(y, ahead, back, self.tp_group)
        if row and bias is not None:
            y = y + bias
        return (y, self.bias.to(y.dtype)) if self.return_bias else y


class LayerNormLinear(Linear):
    """TransformerEngine's LayerNormLinear with RMSNorm: `layer_norm_weight` lies in the linear."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        return_layernorm_output: bool = False,
        zero_centered_gamma: bool = False,
        **linear: Any,
    ) -> None:
        assert normalization == "RMSNorm" and not return_layernorm_output
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        super().__init__(in_features, out_features, **linear)

    def _add_norm(self, size: int, **where: Any) -> None:
        first = nn.init.zeros_ if self.zero_centered_gamma else nn.init.ones_
        self._add("layer_norm_weight", (size,), first, **where)

    def _marks(self, name: str) -> dict[str, Any]:
        if name == "layer_norm_weight":
            return {"sequence_parallel": self.sequence_parallel}
        return super()._marks(name)

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """Normalises what this rank has, then as Linear."""
        zero = self.zero_centered_gamma
        x = _rms_norm(x, self.layer_norm_weight, self.eps, zero_centered=zero)
        return super().forward(x, is_first_microbatch)


class DotProductAttention(nn.Module):
    """TransformerEngine's attention for (T, b, heads, d) with a causal mask; no dropout."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.1,
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: Group = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        softmax_scale: float | None = None,
    ) -> None:
        super().__init__()
        assert attention_type == "self" and attention_dropout == 0
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        assert num_attention_heads % groups == 0
        self.heads = num_attention_heads // tp_size
        self.groups = groups // tp_size
        self.scale = 1 / math.sqrt(kv_channels) if softmax_scale is None else softmax_scale
        self.window = window_size
        self.attn_mask_type = attn_mask_type

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: str | None = None,
        qkv_format: str = "sbhd",
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
    ) -> Tensor:
        """query (T, b, heads/t, d), key and value (T, b, groups/t, d) -> (T, b, heads/t * d).

        thd: rows end to end, query (N, heads/t, d), key and value alike -> (N, heads/t * d).
        """
        mask_type = attn_mask_type or self.attn_mask_type
        if qkv_format == "thd":
            assert mask_type == "padding_causal" and cu_seqlens_q_padded is cu_seqlens_kv_padded
            assert cu_seqlens_q is not None and cu_seqlens_q is cu_seqlens_kv, cu_seqlens_kv
            assert cu_seqlens_q.dtype == torch.int32 and cu_seqlens_q.device == query.device
            lengths = cu_seqlens_q.diff().tolist()
            assert sum(lengths) == len(query) and max(lengths) == max_seqlen_q == max_seqlen_kv
            rows = zip(*(x.split(lengths) for x in (query, key, value)), strict=True)
            whole = [DotProductAttention.forward(self, *(x[:, None] for x in row)) for row in rows]
            return torch.cat(whole)[:, 0]
        assert attention_mask is None and mask_type == "causal"
        assert key.shape[2] == value.shape[2] == self.groups, (
            f"Keys and values must have num_gqa_group = {self.groups} heads! Found {key.shape[2]}"
        )
        assert query.shape[2] == self.heads, (query.shape, self.heads)
        q, k, v = (x.permute(1, 2, 0, 3).float() for x in (query, key, value))
        k, v = (x.repeat_interleave(self.heads // self.groups, 1) for x in (k, v))
        places = torch.arange(len(query), device=query.device)
        distance = places[:, None] - places
        seen = distance >= 0
        if self.window is not None and self.window[0] >= 0:
            seen &= distance <= self.window[0]
        scores = (q @ k.mT * self.scale).masked_fill(~seen, -torch.inf)
        return (scores.softmax(-1) @ v).permute(2, 0, 1, 3).flatten(2).to(query.dtype)


class FusedAdam(torch.optim.Optimizer):
    """Adam that counts its steps in the groups, and makes state where there is none."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
    ) -> None:
        assert adam_w_mode and bias_correction
        known = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, known)

    @torch.no_grad()
    def step(self, closure: Any = None, grad_scaler: Any = None) -> None:  # type: ignore[override]
        """AdamW (Loshchilov and Hutter 2019)."""
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    for name in ("exp_avg", "exp_avg_sq"):
                        state[name] = torch.zeros_like(parameter, dtype=torch.float32)
                if parameter.grad is not None:
                    _step(parameter, parameter.grad.float(), state, group)


def _step(parameter: Tensor, gradient: Tensor, state: dict[str, Tensor], group: Any) -> None:
    beta1, beta2 = group["betas"]
    state["exp_avg"].lerp_(gradient, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    mean = state["exp_avg"] / (1 - beta1 ** group["step"])
    spread = (state["exp_avg_sq"] / (1 - beta2 ** group["step"])).sqrt() + group["eps"]
    parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * mean / spread)
