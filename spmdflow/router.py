"""The routers of a mixture of experts: which experts each token gets, recorded or repeated.

A router scores the E experts for each token and selects k of them with `torch.topk`, in every
family of transformers. `Routers` intercepts this call. It can record the selected experts, or
replace them by those of another forward: router replay (Ma et al. 2025, "Stabilizing MoE
Reinforcement Learning by Aligning Training and Inference Routers"). The weights of the experts are
then computed from the model's own scores at the given experts, with gradients.

Routers are found by what transformers records as `router_logits`, so no family is named here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from spmdflow.errors import ConfigError

OWN_CHOICE = -1
"""In routes: the router selects for this token itself."""
OWN_IN_UINT8 = 255
"""The same in a column of uint8."""
ROUTES = "routed_experts"
"""Column (ragged, (tokens of prompt and response, layers, k)): the experts of each token."""
_SELECTION = (torch.topk, Tensor.topk)
_SIGMOID = (torch.sigmoid, Tensor.sigmoid, nn.functional.sigmoid)


@dataclass(frozen=True)
class RoutedLayer:
    """What one router did in one forward."""

    logits: Tensor
    """(T, E), as the family returns them, with gradients."""
    experts: Tensor
    """(T, k) int64: the experts that were used."""
    uses_sigmoid: bool
    """Scores are sigmoids of the logits, as in DeepSeek-V3. False: a softmax over the experts."""

    @property
    def probabilities(self) -> Tensor:
        """(T, E) float32: the scores of all experts, divided by their sum, with gradients."""
        if self.uses_sigmoid:
            scores = self.logits.float().sigmoid()
            return scores / scores.sum(-1, keepdim=True)
        return self.logits.float().softmax(-1)


class Routers:
    """All routers of a module, in the order of its layers. Replaces their forward functions."""

    def __init__(self, routers: list[nn.Module], logits_index: int | None, num_chosen: int) -> None:
        """routers: as `Routers.of` finds them. logits_index: of the logits in a router's output;
        None: the output is the logits. num_chosen: k."""
        self.num_layers = len(routers)
        self.num_experts = _num_experts(routers[0])
        self.num_chosen = num_chosen
        self.records = False
        """Whether forwards are recorded for `take`."""
        self._logits_index = logits_index
        self._routes: Tensor | None = None
        self._recorded: list[RoutedLayer | None] | None = None
        for layer, router in enumerate(routers):
            self._wrap(router, layer)

    @classmethod
    def of(cls, model: Any) -> Routers | None:
        """Return the routers of a transformers model. None if it has no experts.

        Replaces the forward functions of the routers, so it is called once for a model, before its
        layers are wrapped.
        """
        recorded = getattr(model.base_model, "_can_record_outputs", None) or {}
        recorder = recorded.get("router_logits")
        if recorder is None:
            return None
        if isinstance(recorder, list):
            recorder = recorder[-1]  # JetMoe: attention has experts too
        target = getattr(recorder, "target_class", recorder)
        layer_name = getattr(recorder, "layer_name", None) or ""
        routers = []
        for name, part in model.named_modules():
            if isinstance(part, target) and layer_name in name:
                routers.append(part)
        if not routers:
            return None
        is_linear = target is nn.Linear
        index = None if is_linear else getattr(recorder, "index", 0)
        return cls(routers, index, _num_chosen(model.config, routers[0]))

    def own_routes(self, num_tokens: int) -> Tensor:
        """(num_tokens, layers, k) int16: routes by which the routers select themselves."""
        shape = (num_tokens, self.num_layers, self.num_chosen)
        return torch.full(shape, OWN_CHOICE, dtype=torch.int16)

    def begin(self, routes: Tensor | None = None) -> None:
        """Prepare the next forward, which is recorded if `records` is set.

        routes (T, layers, k): the experts to use, in the order of the tokens in the forward;
        `OWN_CHOICE` where the router selects itself. None: the routers select all. They stay until
        the next call, because a backward may run layers again.
        """
        self._routes = routes
        self._recorded = [None] * self.num_layers if self.records else None

    def take(self) -> list[RoutedLayer]:
        """Return what the routers did since `begin`, a record for each layer; ends the recording.

        [] for a family whose routers do not select their experts with torch.topk.
        """
        recorded = self._recorded or []
        self._recorded = None
        layers = [record for record in recorded if record is not None]
        return layers if len(layers) == len(recorded) else []

    def take_all(self) -> list[RoutedLayer]:
        """The same, where the settings need it: ConfigError instead of []."""
        layers = self.take()
        if not layers:
            raise ConfigError.of(
                "mixture of experts",
                "a family whose routers do not select their experts with torch.topk",
                "one whose selection can be read",
                "set actor.update.router=own and actor.update.router_balance_coef=0",
            )
        return layers

    def _wrap(self, router: nn.Module, layer: int) -> None:
        """Replace the router's forward by one that records, and repeats the given routes."""
        original: Callable[..., Any] = router.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            routes = None if self._routes is None else self._routes[:, layer].long()
            choice = _ChoiceOfExperts(self.num_experts, routes)
            with choice:
                output = original(*args, **kwargs)
            recorded = self._recorded
            if recorded is not None and recorded[layer] is None and choice.experts is not None:
                logits = output if self._logits_index is None else output[self._logits_index]
                recorded[layer] = RoutedLayer(
                    logits.flatten(0, -2), choice.experts, choice.uses_sigmoid
                )
            return output

        router.forward = forward


class _ChoiceOfExperts(TorchFunctionMode):
    """Intercepts a router's selection: torch.topk over scores (T, E)."""

    def __init__(self, num_experts: int, routes: Tensor | None) -> None:
        """routes (T, k): experts to use instead, or `OWN_CHOICE`. None: the router's own."""
        super().__init__()
        self._num_experts = num_experts
        self._routes = routes
        self.experts: Tensor | None = None
        """(T, k): the experts that were used. None: nothing was selected."""
        self.uses_sigmoid = False

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the function; of the selection, return other experts and their scores if set."""
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if function in _SIGMOID:
            self.uses_sigmoid = self.uses_sigmoid or result.shape[-1:] == (self._num_experts,)
        if function not in _SELECTION:
            return result
        scores = args[0] if args else kwargs["input"]
        if scores.ndim != 2 or scores.shape[1] != self._num_experts:
            return result  # of groups of experts (DeepSeek-V3)
        if self._routes is None:
            self.experts = result.indices
            return result
        experts = torch.where(self._routes == OWN_CHOICE, result.indices, self._routes)
        self.experts = experts
        return torch.return_types.topk((scores.gather(-1, experts), experts))


def route_dtype(num_experts: int) -> torch.dtype:
    """The type of a column of routes: uint8, or int16 for 255 experts or more."""
    return torch.uint8 if num_experts < OWN_IN_UINT8 else torch.int16


def own_column(dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Entries of a column of this type, by which the routers select themselves."""
    own = OWN_IN_UINT8 if dtype == torch.uint8 else OWN_CHOICE
    return torch.full(tuple(shape), own, dtype=dtype)


def as_column(routes: Tensor, num_experts: int) -> Tensor:
    """Routes as they are stored; see `route_dtype`."""
    return routes.to(route_dtype(num_experts))  # -1 becomes 255


def from_column(routes: Tensor) -> Tensor:
    """The inverse of `as_column`: int16, with `OWN_CHOICE` where a router selects itself."""
    if routes.dtype != torch.uint8:
        return routes
    return torch.where(routes == OWN_IN_UINT8, OWN_CHOICE, routes.to(torch.int16))


def _num_experts(router: nn.Module) -> int:
    """The number of rows of the router's matrix."""
    matrices = [parameter for parameter in router.parameters() if parameter.ndim == 2]
    return matrices[0].shape[0]


def _num_chosen(config: Any, router: nn.Module) -> int:
    """k: what the router states, or the config of its model."""
    stated = getattr(router, "top_k", None)
    return int(stated if stated is not None else config.num_experts_per_tok)
