"""A sync between a trainer and a generator of one rank: what is planned, moved and refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from spmdflow.blocks.box import Box
from spmdflow.blocks.hash import positional_hash
from spmdflow.config.schema import RolloutConfig
from spmdflow.errors import WeightSyncError
from spmdflow.hybrid_engine.sync import BoxSync
from spmdflow.parallel.group import GroupTable
from spmdflow.parallel.layout import Layout
from spmdflow.rollout.generator import generator_of
from tests.rollout_reference import load, write_family, write_llama

CPU = torch.device("cpu")
VICTIM = "model.layers.1.self_attn.k_proj.weight"


class Trainer(SimpleNamespace):
    """Whole tensors, as an engine of one rank holds them."""

    tensors: dict[str, Tensor]

    def blocks(self) -> list[tuple[str, Tensor, Box]]:
        return [(name, t, Box.of_shape(t.shape)) for name, t in self.tensors.items()]

    def settle(self) -> None:
        """Nothing is running."""

    def shard_hashes(self, dtype: torch.dtype) -> dict[str, int]:
        return {name: positional_hash(t.to(dtype)) for name, t in self.tensors.items()}


def sync_of(path: str, change: Callable[[dict[str, Tensor]], None] = lambda _: None) -> BoxSync:
    """From changed weights of a folder to a generator of that folder."""
    tensors = {name: p.detach().clone() for name, p in load(path).named_parameters()}
    change(tensors)
    trainer: Any = Trainer(
        tensors=tensors,
        layout=Layout((0,)),
        groups=GroupTable(0, timeout_seconds=1),
        from_all=lambda mine: [mine],
        device=CPU,
        weights_version=3,
        gathered_bytes=0,
    )
    generator = generator_of(RolloutConfig(), path, CPU)
    return BoxSync(trainer, generator, rank=0, seconds=1, verify_every=1)


def _skip_one(tensors: dict[str, Tensor]) -> None:
    del tensors[VICTIM]


def _misshape_one(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(3)


def _add_one(tensors: dict[str, Tensor]) -> None:
    tensors["model.extra.weight"] = torch.ones(3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            _skip_one,
            rf"got rollout tensor {VICTIM} of shape \(32, 64\), expected the trainer's None",
        ),
        (_misshape_one, r"model.norm.weight of shape \(64,\), expected the trainer's \(3,\)"),
        (_add_one, r"model.extra.weight of shape None, expected the trainer's \(3,\)"),
    ],
)
def test_trainer_of_another_model_is_refused_with_the_tensor_that_differs(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], None], message: str
) -> None:
    path = write_llama(tmp_path / "model")

    with pytest.raises(WeightSyncError, match=message):
        sync_of(path, change)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_rank_that_holds_everything_copies_it_and_receives_nothing(
    tmp_path: Path, family: str
) -> None:
    write_family(tmp_path / "model", family)

    def renew(tensors: dict[str, Tensor]) -> None:
        for tensor in tensors.values():
            tensor += torch.randn_like(tensor)

    hybrid = sync_of(str(tmp_path / "model"), renew)
    metrics = hybrid.sync()

    assert metrics["rollout/weights_verified"].value == 1  # type: ignore[union-attr]
    assert metrics["rollout/synced_bytes"].total == 0  # type: ignore[union-attr]
    assert not hybrid.needs_sync


def test_family_without_a_weight_table_is_synced_by_its_own_names(tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=64)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")

    hybrid = sync_of(str(tmp_path / "gpt2"), lambda tensors: None)

    assert hybrid.sync()["rollout/weights_verified"].value == 1  # type: ignore[union-attr]
