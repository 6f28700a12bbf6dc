"""FSDP on one rank with the weights of SmolLM2-135M-Instruct: log-probabilities of responses.

Usage: torchrun --nproc-per-node 1 smollm2_engine.py FOLDER SIZE ...: prompts of so many tokens,
read from a file by the functions of a run. Writes FOLDER/results.json: the largest differences to
plain transformers in float32, by row, packed and padded.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from spmdflow.config.schema import DataConfig, EngineConfig, ModelConfig, OptimizerConfig
from spmdflow.data.ragged import ragged_from_rows, rows_of
from spmdflow.datasets.scan import PromptSource, scan
from spmdflow.datasets.tokenizer import load_tokenizer
from spmdflow.kind.engine import engine_kind
from spmdflow.kind.registry import resolve
from spmdflow.objectives.log_prob import CausalOutput
from spmdflow.parallel.group import GroupSpec, GroupTable
from spmdflow.parallel.layout import Layout
from spmdflow.worker_api.worker import WorkerContext
from spmdflow.workers.engine import TrainEngine
from spmdflow.workers.micro_batch import MicroBatch
from spmdflow.workers.model import load_model
from tests.smollm2 import END, SMOLLM2, model_of_transformers, plain_logits, words_of

RESPONSE = 6
"""Tokens of a response before its end."""


def main(folder: Path, sizes: list[int]) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    groups = GroupTable(0, timeout_seconds=600)
    groups.make([GroupSpec((0,), "compute", "gloo")])
    batch = read_batch(folder, sizes)
    expected = plain_log_probs(batch)
    results = {}
    for name, options, parts in (("packed", [], 1), ("padded", ["padded"], 2)):
        engine = engine_of(groups, options)
        found = engine.forward(batch, log_probs, num_micro_batches=parts)
        assert isinstance(found, TensorDict)
        gaps = []
        for ours, plain in zip(rows_of(found["found"]), expected, strict=True):
            gaps.append(float((ours - plain).abs().max()))
        results[name] = gaps
    lengths = [len(row) for row in rows_of(batch["prompts"])]
    (folder / "results.json").write_text(json.dumps({"gaps": results, "prompts": lengths}))
    dist.destroy_process_group()


def read_batch(folder: Path, sizes: list[int]) -> TensorDict:
    """Prompts of these sizes, each with a response that ends with the end of a turn."""
    tokenizer = load_tokenizer(str(SMOLLM2))
    path = folder / "prompts.jsonl"
    texts = [words_of(tokenizer, size, seed=number) for number, size in enumerate(sizes)]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    cfg = DataConfig(
        train_path=str(path), tokenizer_path=str(SMOLLM2), max_prompt_tokens=max(sizes)
    )
    report = scan(cfg, cfg.train_path, tokenizer)
    prompts = PromptSource(report.files, cfg).read_rows(report.rows.tolist())["prompts"]
    responses = []
    for number in range(len(sizes)):
        words = words_of(tokenizer, RESPONSE - number % 2, seed=100 + number)
        responses.append(torch.tensor([*tokenizer(words).input_ids, END]))
    columns = {"prompts": prompts, "responses": ragged_from_rows(responses, dtype=torch.int64)}
    return TensorDict(columns, batch_size=[len(sizes)])


def plain_log_probs(batch: TensorDict) -> list[Tensor]:
    """Of each response token, by transformers, one row at a time."""
    model = model_of_transformers()
    rows = []
    for prompt, response in zip(
        rows_of(batch["prompts"]), rows_of(batch["responses"]), strict=True
    ):
        logits = plain_logits(model, prompt.tolist(), response.tolist())
        rows.append(logits.log_softmax(-1).gather(1, response[:, None])[:, 0])
    return rows


def log_probs(output: CausalOutput, micro: MicroBatch) -> dict[str, Tensor]:
    return {"found": micro.spread(output.log_probs(1.0))}


def engine_of(groups: GroupTable, options: list[str]) -> TrainEngine:
    context: Any = WorkerContext(
        "actor", Layout.data_parallel((0,)), 0, groups, torch.device("cpu"), seed=0
    )
    model = load_model(ModelConfig(path=str(SMOLLM2), dtype="float32"), head="causal_lm")
    cfg = EngineConfig(kind="fsdp", options=options)
    engine = resolve(engine_kind("fsdp").implementation)
    made: TrainEngine = engine(
        model, cfg, context, optimizer=OptimizerConfig(), total_optimizer_steps=1
    )
    return made


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(word) for word in sys.argv[2:]])
