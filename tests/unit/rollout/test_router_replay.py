"""Router replay: the trainer uses the experts that the generator used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from scripts.families.tiny import FAMILIES, save_tiny_model
from spmdflow.config.schema import ModelConfig, RolloutConfig
from spmdflow.data.ragged import lengths_of, ragged_from_rows
from spmdflow.errors import ConfigError
from spmdflow.rollout.builtin import BuiltinGenerator
from spmdflow.rollout.sampling import Sampling
from spmdflow.router import ROUTES
from spmdflow.workers.micro_batch import micro_batches
from spmdflow.workers.model import load_model
from spmdflow.workers.sharding import read_weights
from tests.random_tokens import random_tokens

CPU = torch.device("cpu")
NUM_EXPERTS = 8
MIXTURES = ("qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next", "granitemoe", "minimax_m2")
MIXTURES += ("dots1", "ernie4_5_moe", "qwen2_moe", "mixtral", "olmoe", "glm4_moe")
BY_DEFAULT = ("qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next")
CASES = [
    pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.slow) for name in MIXTURES
]


@contextmanager
def shifted_selection() -> Iterator[None]:
    """Routers select other experts, as imprecise kernels would; the weights' formula stays."""
    select = torch.topk
    shift = torch.linspace(-0.3, 0.3, NUM_EXPERTS)

    def topk(scores: Tensor, k: int, *args: Any, **kwargs: Any) -> Any:
        if scores.ndim != 2 or scores.shape[1] != NUM_EXPERTS:
            return select(scores, k, *args, **kwargs)
        chosen = select(scores + shift, k, *args, **kwargs).indices
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "topk", topk)
        patch.setattr(Tensor, "topk", topk)
        yield


def generated(folder: Path, prompts: list[Tensor]) -> TensorDict:
    """Rows of a generator that selects shifted experts and returns them; prompts included."""
    cfg = RolloutConfig(max_new_tokens=9, max_batch_size=4, dtype="float32")
    generator = BuiltinGenerator(cfg, str(folder), CPU)
    generator.return_routes()
    jagged = ragged_from_rows(prompts)
    with shifted_selection():
        columns = generator.generate(jagged, Sampling.from_config(cfg), range(len(prompts)))
    columns["prompts"] = jagged
    return columns


def largest_gap(folder: Path, rows: TensorDict, *, packed: bool) -> float:
    """Of a token's log-probability between the trainer and the generator."""
    module = read_weights(load_model(ModelConfig(path=str(folder)), head="causal_lm"), CPU)
    micros = micro_batches(
        rows, num_micro_batches=2, by_tokens=False, device=CPU, packed=packed, shares_prompts=packed
    )
    gap = 0.0
    for micro in micros:
        with torch.no_grad():
            found = micro.spread(module(micro, lambda output, _: output.log_probs()))
        difference = (found - micro.columns["rollout_log_probs"]).abs() * micro.response_mask
        gap = max(gap, float(difference.max()))
    return gap


@pytest.mark.parametrize("family", CASES)
def test_replayed_experts_close_the_gap_that_another_selection_opens(
    family: str, tmp_path: Path
) -> None:
    """Above 1e-2 without replay, below 1e-5 with it; two prompts are equal and share a prefill."""
    folder = save_tiny_model(family, tmp_path / family)
    prompts = random_tokens(5, 17, 1, 3, 8)

    rows = generated(folder, [*prompts, prompts[1], prompts[1]])

    assert rows[ROUTES].dtype == torch.uint8
    sizes = lengths_of(rows["prompts"]) + lengths_of(rows["responses"])
    assert torch.equal(lengths_of(rows[ROUTES]), sizes)
    ways = [False] if family == "qwen3_next" else [False, True]
    for packed in ways:
        assert largest_gap(folder, rows, packed=packed) < 1e-5
        assert largest_gap(folder, rows.exclude(ROUTES), packed=packed) > 1e-2


def test_every_mixture_of_the_table_is_here() -> None:
    dense = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    mixtures = {name for name, more in FAMILIES.items() if any(key in more for key in dense)}
    assert mixtures == set(MIXTURES)


def test_a_dense_model_has_no_experts_to_return(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path)
    generator = BuiltinGenerator(RolloutConfig(), str(folder), CPU)
    with pytest.raises(ConfigError, match="returns no experts for this model"):
        generator.return_routes()
