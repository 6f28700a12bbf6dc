"""The trainer's side of test_vllm_outside: updates, published weights, and what the server says.

Every function runs on two gloo ranks; the answers are rank 0's.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from engine_state import full_tensors
from fsdp_reference import make_batch

from spmdflow.config.leaf import defaults
from spmdflow.config.schema import ActorConfig
from spmdflow.errors import SpmdflowError
from spmdflow.models.policy import PolicyWorker
from spmdflow.parallel.group import GroupSpec, GroupTable
from spmdflow.serving.nccl import build_weight_source, source_of
from spmdflow.weights.table import parameters
from spmdflow.worker_api.worker import WorkerContext
from tests.rollout_reference import MARGIN, load

ROUNDS = 3
MAX_TOKENS = 8
PROMPTS = [[5, 6, 7, 8] * 5, [9, 10] * 80, [11], [12, 13, 14]]
"""One is longer than a block of vLLM's prefix cache (128 tokens on CPU)."""


def trainer_of(path: str, kind: str, layout: str, groups: GroupTable) -> PolicyWorker:
    """A policy on both ranks."""
    cfg = defaults(ActorConfig)
    cfg.model.lora = cfg.rollout.lora = None
    cfg.model.path = path
    cfg.model.dtype = "float32"
    cfg.optimizer.lr = 5e-3
    cfg.engine.kind = kind
    cfg.engine.layout = layout
    ranks = tuple(range(dist.get_world_size()))
    grid = PolicyWorker.layout_of(cfg, ranks)
    groups.make(
        [GroupSpec(group, "compute", "gloo") for group in PolicyWorker.needed_groups(cfg, grid)]
    )
    context = WorkerContext("actor", grid, dist.get_rank(), groups, torch.device("cpu"), 0, 0, 60.0)
    return PolicyWorker(cfg, context)


def publish_rounds(
    path: str, url: str, cases: list[tuple[str, str]], dtype: str, server: str
) -> list[dict]:
    """For each (engine.kind, engine.layout): three updates, each published and compared.

    server: program or serve, by the routes that generate.
    """
    groups = GroupTable(dist.get_rank(), timeout_seconds=600)
    found = []
    for kind, layout in cases:
        worker = trainer_of(path, kind, layout, groups)
        worker.connect_server(url)
        for number in range(ROUNDS):
            update(worker, number)
            model = trained_model(worker, dtype)
            worker.publish_weights()
            metrics: dict[str, Any] = worker.take_metrics()
            if dist.get_rank() == 0:
                said = _GENERATED[server](url)
                faults = disagreements(model, said["tokens"])
                found.append(
                    {
                        "faults": faults,
                        "metrics": {n: value[0] for n, value in metrics.items()},
                        **said,
                    }
                )
    return found


def publish_faults(path: str, url: str, name: str) -> list[str]:
    """What a stale tensor is answered with, once the server keeps it back."""
    groups = GroupTable(dist.get_rank(), timeout_seconds=600)
    worker = trainer_of(path, "fsdp", "t1", groups)
    worker.connect_server(url)
    if dist.get_rank() == 0:
        ask(url, "plant", {"name": name})
    dist.barrier()
    said = []
    for number in range(2):  # the first update's values are the ones that stay
        update(worker, number)
        try:
            worker.publish_weights()
            said.append("")
        except SpmdflowError as err:
            said.append(f"{type(err).__name__}: {err}")
    return said


def check_source(path: str, kind: str, layout: str) -> dict[str, Any]:
    """Our tensors as vLLM's own NCCL engine takes them, before anything is broadcast."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

    worker = trainer_of(path, kind, layout, GroupTable(dist.get_rank(), timeout_seconds=600))
    worker.cfg.rollout.dtype = "bfloat16"
    ours = source_of(worker.engine, worker.context, worker.cfg)
    shapes = {each.name: torch.Size(each.shape) for each in parameters(ours.arch)}
    source = build_weight_source(shapes, ours.tensors, dtype=ours.dtype)
    whole = {n: tensor.to(torch.bfloat16) for n, tensor in full_tensors(worker.engine)}
    passes = []
    for _ in range(2):
        meta = source.metadata if isinstance(source.metadata, list) else source.metadata()  # 0.33
        checked = NCCLTrainerWeightTransferEngine._checked_iter
        pairs = checked(source, meta) if dist.get_rank() == 0 else source
        passes.append({name: tensor.clone() for name, tensor in pairs})
    grouped = getattr(source, "iter_groups", lambda: [(list(shapes), None)])()  # none in 0.33
    return {
        "names": list(passes[0]) == list(shapes) == sum((names for names, _ in grouped), []),
        "equal": [all(torch.equal(made[n], whole[n]) for n in whole) for made in passes],
        "bytes": sum(tensor.nbytes for tensor in passes[0].values()),
    }


def connect_only(path: str, url: str, backend: str = "spmdflow") -> str:
    """The error of a connection that cannot be made."""
    groups = GroupTable(dist.get_rank(), timeout_seconds=600)
    worker = trainer_of(path, "fsdp", "t1", groups)
    try:
        worker.connect_server(url, backend)
    except SpmdflowError as err:
        return f"{type(err).__name__}: {err}"
    return ""


def update(worker: PolicyWorker, seed: int) -> None:
    """One optimizer step on rows that differ between dp ranks."""
    dp = worker.context.layout.coordinate(worker.context.rank).dp
    batch = make_batch(5, seed=10 * seed + dp)
    worker.engine.train_step(batch, worker.loss, num_micro_batches=1)


def trained_model(worker: PolicyWorker, dtype: str) -> Any:
    """A transformers model with the trainer's weights, rounded as the server's are."""
    model = load(worker.cfg.model.path)
    weights = {
        name: tensor.to(getattr(torch, dtype)).float()
        for name, tensor in full_tensors(worker.engine)
    }
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    return model


def _by_program(url: str) -> dict[str, Any]:
    return ask(url, "generate", {"prompts": PROMPTS})


def _by_serve(url: str) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_tokens": MAX_TOKENS, "ignore_eos": True}
    requests = [{"token_ids": prompt, "sampling_params": sampling} for prompt in PROMPTS]
    answers = [ask(url, "inference/v1/generate", request) for request in requests]
    tokens = [answer["choices"][0]["token_ids"] for answer in answers]
    return {"tokens": tokens, "version": ask(url, "weight_info")["weight_version"]}


_GENERATED = {"program": _by_program, "serve": _by_serve}


def ask(url: str, route: str, body: dict[str, Any] | None = None) -> Any:
    """A request to the server."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"{url}/{route}", data=data, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


@torch.no_grad()
def disagreements(
    model: Any, answers: list[list[int]], prompts: list[list[int]] = PROMPTS
) -> list[str]:
    """Greedy tokens that are not transformers', but where its two best logits nearly tie."""
    faults = []
    for row, (prompt, tokens) in enumerate(zip(prompts, answers, strict=True)):
        ids = torch.tensor([prompt + tokens])
        best = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].topk(2)
        margins = best.values[:, 0] - best.values[:, 1]
        for place, token in enumerate(tokens):
            if token != best.indices[place, 0] and margins[place] > MARGIN:
                faults.append(f"row {row} token {place}: {token}, margin {margins[place]:.2g}")
        faults += [] if len(tokens) == MAX_TOKENS else [f"row {row}: {len(tokens)} tokens"]
    return faults
