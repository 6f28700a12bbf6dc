"""Models and engines whose memory is traced, and what the planner says of each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from spmdflow.mapping.dataflow import Engine, Model, Strategy, Workload
from spmdflow.mapping.memory import call_bytes, resident_bytes, save_bytes
from spmdflow.mapping.seconds import add_parts
from spmdflow.parallel.layout import Layout
from spmdflow.weights.architecture import Architecture


def _llama(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int) -> Architecture:
    return Architecture(
        family="llama",
        num_layers=layers,
        hidden_size=hidden,
        ffn_size=ffn,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        vocab_size=32000,
        tied=False,
        max_positions=4096,
        norm_eps=1e-5,
        rope_theta=1e4,
    )


_QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "head_dim": 128,
    "num_key_value_heads": 4,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "30B-A3B": {
        **_QWEN3_MOE,
        **{"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32},
        **{"intermediate_size": 6144, "moe_intermediate_size": 768},
    },
    "235B-A22B": {
        **_QWEN3_MOE,
        **{"hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64},
        **{"intermediate_size": 12288, "moe_intermediate_size": 1536},
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "hidden_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 2880,
        "hidden_act": "silu",
        "vocab_size": 201088,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
}
"""config.json of mixtures: Qwen 3's, and gpt-oss-20b with weights that are not quantized."""
SHAPES = {
    "tiny": _llama(2, 256, 512, 8, 8),
    "1B": _llama(16, 2048, 5632, 16, 4),
    "0.5B": replace(
        _llama(24, 896, 4864, 14, 2),
        vocab_size=151936,
        tied=True,
        qkv_bias=True,
        o_bias=True,  # as a Llama's attention_bias has it
        max_positions=32768,
    ),
    "3B": replace(_llama(28, 3072, 8192, 24, 8), vocab_size=128256, tied=True),
    "34B": _llama(48, 8192, 22016, 64, 8),
    "7B": _llama(32, 4096, 11008, 32, 32),
    "13B": _llama(40, 5120, 13824, 40, 40),
    "70B": _llama(80, 8192, 28672, 64, 8),
    **{name: Architecture.sizes_from_config(config) for name, config in CONFIGS.items()},
}
"""Llama 2's, Code Llama's (34B), Llama 3.2's (3B) and Qwen 2.5's (0.5B)."""

ROWS = 64
LENGTH = 4096
"""Of a generation: sequences of a replica, and the tokens of each."""


@dataclass(frozen=True)
class Case:
    """One model under one engine; the memory of one of its ranks."""

    size: str
    num_ranks: int
    kind: str = "fsdp"
    options: tuple[str, ...] = ()
    tp: int = 1
    pp: int = 1
    stage: int = 0
    """The rank that is traced is the first of this pipeline stage."""
    trained: bool = True
    head: str = "causal_lm"
    rows: int = 1
    """Of a micro-batch."""
    prompt: int = 1024
    response: int = 1024
    num_micro_batches: int = 2
    virtual: int = 1
    """Parts of the model on each stage."""
    ep: int = 1
    """Ranks that divide the experts of a mixture."""
    cp: int = 1
    """Ranks that divide the tokens of a row."""
    context_attention: str = "auto"
    """How attention works then."""
    entropy: float = 0.0
    """Weight of the entropy in the policy's loss."""
    dtype: str = "bfloat16"
    uneven: bool = False
    """No two rows of a micro-batch are equally long; `prompt` and `response` are means."""
    samples: int = 1
    """Neighbouring rows that have the same prompt."""

    @property
    def shape(self) -> Architecture:
        """Of the model, with the case's head."""
        return replace(SHAPES[self.size], head=self.head)

    @property
    def layout(self) -> Layout:
        """Of all ranks."""
        if self.tp * self.pp == 1 and self.kind != "megatron":
            ranks = tuple(range(self.num_ranks))
            sharded = self.engine.sharding.parameters
            shard = self.num_ranks if sharded else 1
            dp = len(ranks) // self.cp
            sizes = {"dp_size": dp, "cp_size": self.cp, "expert_size": self.ep}
            return Layout(ranks, shard_size=shard, **sizes)
        dp = self.num_ranks // (self.tp * self.pp * self.cp)
        sizes = {"pp_size": self.pp, "dp_size": dp, "tp_size": self.tp, "cp_size": self.cp}
        sizes |= {"expert_size": self.ep, "virtual_size": self.virtual}
        return Layout(tuple(range(self.num_ranks)), **sizes)

    @property
    def rank(self) -> int:
        """Which is traced."""
        return self.layout.axis_group(0, "replica")[self.stage * self.tp * self.cp]

    @property
    def engine(self) -> Engine:
        """As the planner knows it."""
        return Engine(
            kind=self.kind,
            options=self.options,
            micro_batch_rows=self.rows,
            virtual_size=self.virtual,
            dtype=self.dtype,
            context_attention=self.context_attention,
        )

    @property
    def cut(self) -> Strategy:
        """As the planner knows it."""
        dp = self.num_ranks // (self.tp * self.pp * self.cp)
        recompute = "recompute" in self.options
        return Strategy(self.tp, self.pp, dp, recompute=recompute, ep=self.ep, cp=self.cp)

    @property
    def prompts(self) -> list[int]:
        """Tokens of each row of a micro-batch."""
        middle = (self.rows - 1) / 2
        step = 128 * self.uneven
        return [self.prompt + int(step * (row - middle)) for row in range(self.rows)]

    @property
    def name(self) -> str:
        """Such as 7B@8 fsdp recompute."""
        virtual = f"v{self.virtual}" if self.virtual > 1 else ""
        cut = f" t{self.tp}p{self.pp}{virtual}" * (self.kind == "megatron")
        stage = f" stage {self.stage}" * (self.pp > 1)
        cut += f" e{self.ep}" * (self.ep > 1) + f" c{self.cp}" * (self.cp > 1)
        cut += f" {self.context_attention}" * (self.context_attention != "auto")
        words = [*self.options, *["frozen"] * (not self.trained)]
        words += ["scalar"] * (self.head == "scalar")
        words += [f"{self.rows}x{self.prompt + self.response}"] * (
            (self.rows, self.prompt + self.response) != (1, 2048)
        )
        words += ["entropy"] * (self.entropy > 0)
        words += ["uneven"] * self.uneven + ["float32"] * (self.dtype == "float32")
        words += [f"{self.samples} of a prompt"] * (self.samples > 1)
        words += [f"m{self.num_micro_batches}"] * (self.num_micro_batches != 2)
        return " ".join([f"{self.size}@{self.num_ranks}", f"{self.kind}{cut}{stage}", *words])

    def planned(self) -> dict[str, dict[str, float]]:
        """Bytes by part in each phase, as `pool_memory` adds them."""
        model = Model("actor", self.shape, trained=self.trained, engine=self.engine)
        cut = self.cut
        rows = self.rows * self.num_micro_batches * cut.dp
        work = Workload(rows, self.prompt, self.response, rows_per_prompt=self.samples)
        found = {"resident": resident_bytes(model, cut)}
        for kind in ("infer", "train")[: 1 + self.trained]:
            found[kind] = add_parts(found["resident"], call_bytes(model, kind, work, cut))
        if self.trained:
            found["save"] = add_parts(found["resident"], save_bytes(model, cut))
        return {
            phase: {name: float(np.ravel(size)[0]) for name, size in parts.items()}
            for phase, parts in found.items()
        }


def _cases() -> list[Case]:
    recompute = ("recompute",)
    found = [
        Case("tiny", 8),
        Case("0.5B", 1),
        Case("0.5B", 1, options=recompute, rows=8, prompt=512, response=512),
        Case("0.5B", 1, trained=False),
        Case("7B", 8),
        Case("7B", 8, options=recompute),
        Case("7B", 8, options=recompute, entropy=0.01),
        Case("7B", 8, options=("recompute", "keep_gathered")),
        Case("7B", 8, options=recompute, rows=4),
        Case("7B", 8, options=recompute, num_micro_batches=1),
        Case("7B", 8, trained=False),
        Case("7B", 8, trained=False, head="scalar"),
        Case("7B", 8, head="scalar", options=recompute),
        Case("7B", 8, "zero1", options=recompute),
        Case("7B", 8, "zero1"),
        Case("7B", 8, "zero2", options=recompute),
        Case("7B", 8, "zero2"),
        Case("7B", 8, "zero3", options=recompute),
        Case("13B", 16),
        Case("13B", 16, options=recompute, rows=4),
        Case("13B", 16, trained=False),
        Case("13B", 16, "zero1", options=recompute),
        Case("13B", 16, "zero2", options=recompute),
        Case("70B", 64),
        Case("70B", 64, options=recompute),
        Case("70B", 64, trained=False),
        Case("70B", 64, "zero1", options=recompute),
        Case("70B", 64, "zero2", options=recompute),
        Case("7B", 8, "megatron", tp=2, pp=2),
        Case("7B", 8, "megatron", tp=2, pp=2, stage=1),
        Case("7B", 8, "megatron", tp=2, rows=2),
        Case("7B", 8, "megatron", recompute, tp=2, pp=2, rows=2, num_micro_batches=4),
        Case("7B", 8, "megatron", recompute, tp=2),
        Case("7B", 8, "megatron", recompute, tp=2, head="scalar"),
        Case("7B", 8, "megatron", tp=2, trained=False),
        Case("7B", 8, "megatron", tp=2, trained=False, head="scalar"),
    ]
    for stage in (0, 1, 3):
        for options in ((), recompute, ("sequence_parallel",), ("recompute", "sequence_parallel")):
            more = {"tp": 8, "pp": 4, "stage": stage, "num_micro_batches": 8}
            found.append(Case("70B", 128, "megatron", options, **more))
        found.append(Case("70B", 128, "megatron", tp=8, pp=4, stage=stage, trained=False))
        for options in ((), recompute):
            more = {"tp": 8, "pp": 4, "stage": stage, "num_micro_batches": 8, "virtual": 2}
            found.append(Case("70B", 128, "megatron", options, **more))
    return found


def _mixtures() -> list[Case]:
    """Mixtures of experts, divided over ranks or not; gpt-oss stores the scores of attention."""
    recompute = ("recompute",)
    return [
        Case("30B-A3B", 16, options=recompute, ep=8),
        Case("30B-A3B", 16, options=recompute, ep=8, rows=4),
        Case("30B-A3B", 16, options=recompute),
        Case("30B-A3B", 64, ep=8),
        Case("30B-A3B", 64),
        Case("30B-A3B", 16, trained=False, ep=8),
        Case("gpt-oss-20b", 8, options=recompute, ep=8),
        Case("gpt-oss-20b", 8, options=recompute, ep=8, rows=2),
        Case("gpt-oss-20b", 8, options=recompute, ep=8, response=3072),
        Case("gpt-oss-20b", 8, trained=False, ep=8),
        Case("235B-A22B", 128, options=recompute, ep=16),
        Case("30B-A3B", 16, "megatron", recompute, ep=8),
        Case("30B-A3B", 64, "megatron", ep=8),
        Case("30B-A3B", 16, "megatron", trained=False, ep=8),
        Case("235B-A22B", 128, "megatron", recompute, tp=4, pp=2, ep=16),
        Case("235B-A22B", 128, "megatron", recompute, tp=4, pp=2, ep=16, stage=1),
    ]


def _long_rows() -> list[Case]:
    """Rows of 128k tokens that ranks divide, by all kinds of attention."""
    recompute = ("recompute",)
    long: dict[str, Any] = {"prompt": 4096, "response": 126976, "num_micro_batches": 1}
    return [
        Case("7B", 8, options=recompute, cp=8, **long),
        Case("7B", 8, options=recompute, cp=8, context_attention="gather", **long),
        Case("7B", 8, options=recompute, cp=8, context_attention="ring", **long),
        Case("7B", 8, cp=4, context_attention="ring", prompt=1024, response=7168),
        Case("7B", 8, options=recompute, cp=2, prompt=1024, response=15360),
        Case("7B", 8, cp=4, prompt=1024, response=7168),
        Case("7B", 8, trained=False, cp=8, **long),
        Case("34B", 64, options=recompute, cp=8, **long),
        Case("7B", 8, "megatron", recompute, cp=8, **long),
        Case("7B", 8, "megatron", recompute, cp=8, context_attention="gather", **long),
        Case("7B", 8, "megatron", recompute, cp=8, context_attention="ring", **long),
        Case("7B", 8, "megatron", tp=2, cp=4, prompt=1024, response=15360),
        Case("7B", 8, "megatron", recompute, tp=2, pp=2, cp=2, stage=1, **long),
        Case("7B", 8, "megatron", trained=False, tp=2, cp=4, **long),
    ]


def _more_cases() -> list[Case]:
    """Rows that are padded, and of unequal lengths; the entropy; plain modules."""
    recompute = ("recompute",)
    return [
        Case("7B", 8, options=("recompute", "padded"), rows=4),
        Case("7B", 8, rows=4, uneven=True),
        Case("0.5B", 1, rows=4, prompt=512, response=512, entropy=0.01),
        Case("7B", 8, "zero2", options=recompute, entropy=0.01),
        Case("7B", 8, "megatron", tp=2, entropy=0.01),
        Case("7B", 8, "megatron", recompute, tp=2, entropy=0.01),
        Case("7B", 8, "megatron", recompute, tp=2, pp=2, num_micro_batches=4, virtual=2),
        Case("1B", 1, dtype="float32"),
        Case("1B", 1, options=recompute, entropy=0.01, dtype="float32"),
        Case("1B", 1, trained=False, dtype="float32"),
        Case("1B", 1, rows=4, dtype="float32", uneven=True),
        Case("1B", 1, options=("recompute", "padded"), rows=4, dtype="float32"),
        Case("1B", 1, dtype="float32", head="scalar"),
        Case("1B", 4, options=recompute, rows=4, dtype="float32", uneven=True),
        Case("7B", 8, rows=8, samples=8, prompt=1024, response=512),
        Case("7B", 8, rows=8, samples=4, prompt=1536, response=64),
        Case("7B", 8, "zero2", options=recompute, rows=8, samples=8, prompt=1536, response=512),
        Case("1B", 4, rows=12, samples=8, prompt=1536, response=128),
    ]


CASES = {case.name: case for case in (*_cases(), *_more_cases(), *_mixtures(), *_long_rows())}
HELD_OUT = {
    case.name: case
    for case in (
        Case("3B", 4, options=("recompute",), rows=2),
        Case("34B", 32),
        Case("34B", 32, trained=False),
        Case("34B", 32, "zero2", options=("recompute",)),
        Case("34B", 32, "megatron", tp=8, pp=2, num_micro_batches=4),
    )
}
"""Two sizes that no formula was mended with."""
CASES |= HELD_OUT
SMALL = ("7B@8 fsdp", "7B@8 fsdp frozen scalar", "7B@8 megatron t2p1 frozen scalar")
"""Those that are traced with every push."""
