"""The cases of hybrid_engine.py; the test names them without importing torch's world."""

from __future__ import annotations

from typing import NamedTuple

PARTS = ("parameters", "gradients", "optimizer")


class Case(NamedTuple):
    """A model, the actor's layouts, how weights pass, and what is offloaded."""

    family: str
    train: str
    generate: str
    weights: str
    offload: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


CASES = {
    "blocks": Case("qwen3", "t4", "t2", "blocks"),
    "flat": Case("llama", "t2p2", "t1", "flat", PARTS),
    "copy": Case("qwen2", "t2", "t2", "copy", PARTS),
    "blocks-tied-p2": Case("qwen3", "t2p2", "t2", "blocks", PARTS),
    "blocks-p2-to-p2": Case("qwen3", "t2p2", "t1p2", "blocks"),
    "blocks-bias": Case("qwen2", "t2", "t1", "blocks", options=("plain_optimizer",)),
    "flat-bias": Case("llama with biases", "t4", "t2", "flat", options=("sequence_parallel",)),
    "flat-mistral": Case("mistral", "t2", "t2", "flat"),
    "copy-wider": Case("llama", "t2", "t4", "copy"),
    "copy-strided": Case("mistral", "t4", "t2", "copy"),
    "copy-p2": Case("llama", "p2", "t2", "copy"),
    "copy-t2p2-offload": Case("qwen3", "t2p2", "t2", "copy", PARTS),
    "copy-mistral-wider": Case("mistral", "t2", "t4", "copy"),
}
