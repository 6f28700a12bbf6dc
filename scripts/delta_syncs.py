"""Weight updates of a real optimizer, as servers get them: bits, bytes and the share that changes.

    python scripts/delta_syncs.py                            # the bundled model, 500 syncs a case
    python scripts/delta_syncs.py --model models/SmolLM2-135M-Instruct \\
        --data gsm8k/train.jsonl --syncs 20 --lr 1e-6 1e-5 --tp-sizes 1 3   # $SPMDFLOW_DATA
    python scripts/delta_syncs.py --json                     # the same as JSON

A train engine (FSDP on one process, float32 weights, AdamW) takes a step on real rows; its weights
go to a `WeightMirror`; receivers with the boxes of vLLM's workers take the update through packed
messages, as a server does. After each sync:

- the hash of every tensor of every receiver equals the one that the trainer takes of its shards;
- the bytes of the messages equal the formula of `serving.update`, computed from copies of the
  weights by plain comparison.

Receivers: one of each tensor-parallel size that follows each version, one of the last size that
skips up to ten versions, and newcomers. A difference ends the script with an error.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from spmdflow.blocks.hash import MODULUS, box_hash
from spmdflow.config.offline import SupervisedConfig
from spmdflow.config.schema import EngineConfig, ModelConfig, OptimizerConfig
from spmdflow.data.ragged import ragged_from_rows
from spmdflow.hybrid_engine.sync import compare_hashes
from spmdflow.objectives.supervised import SupervisedLoss
from spmdflow.parallel.group import GroupTable
from spmdflow.parallel.layout import Layout
from spmdflow.rollout.generator import NEVER
from spmdflow.serving.mirror import KEPT_VERSIONS, BoxOf, WeightMirror, trained_shapes
from spmdflow.serving.update import (
    PackedMessage,
    apply_update,
    check_facts,
    cut_into_messages,
    planned_bytes,
)
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.move import Block, Blocks, blocks
from spmdflow.weights.ranks import vllm_shards
from spmdflow.worker_api.worker import WorkerContext
from spmdflow.workers.engine import TrainEngine, engine_of

ARITHMETIC = Path(__file__).parents[1] / "algos" / "arithmetic"
ROWS = 4
"""Of a train step."""
MOST_LAG = 10
"""Versions that the slow receiver skips at most, plus one."""
_BITS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Case:
    """What is trained, and how."""

    model: str
    data: str
    lr: float
    precision: str
    num_syncs: int
    most_tokens: int
    tp_sizes: Sequence[int] = (1, 2)
    """Of the receivers."""


@dataclass
class Result:
    """What was measured in a case, of the first receiver that follows each version."""

    case: Case
    shares: list[float] = field(default_factory=list)
    """Part of all values that changed, by sync."""
    byte_counts: list[int] = field(default_factory=list)
    whole_bytes: int = 0
    """Of an update with all weights."""
    num_checks: int = 0
    """Receivers that were compared, over all syncs."""
    commit_seconds: list[float] = field(default_factory=list)
    """In which the mirror finds what changed."""
    update_seconds: list[float] = field(default_factory=list)
    """In which the messages are made, taken apart and written."""


class Receiver:
    """The live tensors of the workers of one server, from vLLM's tables."""

    def __init__(self, model: str, tp_size: int, dtype: torch.dtype) -> None:
        self.version = NEVER
        self.seconds = 0.0
        self.workers: list[list[Block]] = []
        arch = Architecture.sizes_from_folder(model)
        for tp_rank in range(tp_size):
            table = vllm_shards(arch, tp_size=tp_size, tp_rank=tp_rank, pp_size=1, pp_rank=0)
            local = {}
            for name, tensor in table.items():
                local[name] = torch.zeros(tensor.shape, dtype=dtype)
            self.workers.append(list(blocks(local, table)))

    def follow(self, mirror: WeightMirror) -> int:
        """Take an update, as a server's workers do; return its bytes."""
        began = time.perf_counter()
        num_bytes = 0
        for worker in self.workers:
            boxes: list[BoxOf] = [(name, box) for name, _, box in worker]
            messages = cut_into_messages(mirror.updates(boxes, since=self.version))
            facts = json.loads(json.dumps([[each.facts for each in one] for one in messages]))
            assert check_facts(facts, [box.size for _, box in boxes]) is None
            for message, its_facts in zip(messages, facts, strict=True):
                packed = PackedMessage.of(message, mirror.dtype)
                num_bytes += packed.num_bytes
                for update in packed.split(its_facts):
                    apply_update(worker[update.index][1], update.values, update.positions)
        self.version = mirror.version
        self.seconds = time.perf_counter() - began
        return num_bytes

    def hashes(self) -> dict[str, int]:
        """Of the complete tensors. Ranks that have the same box must have the same values."""
        slots: dict[BoxOf, int] = {}
        for worker in self.workers:
            for name, view, box in worker:
                value = box_hash(view, box)
                assert slots.setdefault((name, box), value) == value, (name, box)
        totals: dict[str, int] = {}
        for (name, _), value in slots.items():
            totals[name] = (totals.get(name, 0) + value) % MODULUS
        return totals


class History:
    """Which values changed with the last versions, by plain comparison of copies."""

    def __init__(self, mirror: WeightMirror) -> None:
        self._mirror = mirror
        self._copy: dict[str, Tensor] = {}
        self._changed: dict[int, dict[str, Tensor]] = {}

    def note(self, weights: Sequence[Block]) -> float:
        """Compare with the copy, replace it; return the part of all values that changed."""
        changed = {}
        count = 0
        for name, view, _ in weights:
            bits = view.view(_BITS[view.element_size()])
            if name in self._copy:
                changed[name] = self._copy[name] != bits
                count += int(changed[name].sum())
            self._copy[name] = bits.clone()
        version = self._mirror.version
        self._changed[version] = changed
        self._changed.pop(version - KEPT_VERSIONS, None)
        return count / self._mirror.num_elements

    def expected_bytes(self, receiver: Receiver) -> int:
        """Bytes of the update of a receiver, by the formula of `serving.update`."""
        is_delta = self._mirror.has_changes_since(receiver.version)
        versions = range(receiver.version + 1, self._mirror.version + 1)
        total = 0
        for worker in receiver.workers:
            for name, view, box in worker:
                if not is_delta:
                    total += view.nbytes
                    continue
                changed = torch.zeros(self._mirror.shapes[name], dtype=torch.bool)
                for version in versions:
                    changed |= self._changed[version][name]
                if 3 * int(changed.sum()) > changed.numel():
                    total += view.nbytes
                else:
                    count = int(changed[box.slices()].sum())
                    total += planned_bytes(count, box.size, view.element_size())
        return total


def make_engine(case: Case) -> TrainEngine:
    """A train engine on this process alone."""
    cfg = SupervisedConfig(
        model=ModelConfig(path=case.model, dtype="float32"),
        engine=EngineConfig(micro_batch_rows=ROWS),
        optimizer=OptimizerConfig(lr=case.lr),
    )
    layout = Layout.data_parallel((0,))
    context = WorkerContext("actor", layout, 0, GroupTable(0), torch.device("cpu"), seed=0)
    return engine_of(cfg, context, head="causal_lm")


def batches(case: Case) -> Iterator[TensorDict]:
    """Rows of the data, again and again, each cut to the most tokens of a case."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(case.model)
    chooser = random.Random(0)
    lines = Path(case.data).read_text(encoding="utf-8").splitlines()
    while True:
        prompts = []
        responses = []
        for line in chooser.sample(lines, ROWS):
            first, second = list(json.loads(line).values())[:2]
            prompt = tokenizer(str(first), add_special_tokens=False)["input_ids"]
            response = tokenizer(str(second), add_special_tokens=False)["input_ids"]
            prompts.append(torch.tensor(prompt[: case.most_tokens // 2]))
            responses.append(torch.tensor(response[: case.most_tokens // 2]))
        masks = [torch.ones(len(response), dtype=torch.bool) for response in responses]
        columns = {
            "prompts": ragged_from_rows(prompts),
            "responses": ragged_from_rows(responses),
            "response_mask": ragged_from_rows(masks),
        }
        yield TensorDict(columns, batch_size=[ROWS])


def take_step(engine: TrainEngine, batch: TensorDict) -> None:
    """Train on rows."""
    parts = engine.count_micro_batches(batch)
    engine.train_step(batch, SupervisedLoss(), num_micro_batches=parts)


def bring_weights(engine: TrainEngine, mirror: WeightMirror) -> None:
    """Copy the engine's weights to where the mirror receives, rounded to its precision."""
    trained = Blocks(engine.blocks())
    for name, view, box in mirror.next_blocks():
        view.copy_(trained.read(name, box))


def run_case(case: Case) -> Result:
    """Train, sync and check. Needs a process group of torch.distributed."""
    dtype = getattr(torch, case.precision)
    engine = make_engine(case)
    mirror = WeightMirror(trained_shapes(case.model), dtype)
    history = History(mirror)
    followers = [Receiver(case.model, tp_size, dtype) for tp_size in case.tp_sizes]
    slow = Receiver(case.model, case.tp_sizes[-1], dtype)
    chooser = random.Random(1)
    result = Result(case)
    rows = batches(case)
    next_turn = 0
    for number in range(case.num_syncs + 1):
        if number:
            take_step(engine, next(rows))
        bring_weights(engine, mirror)
        weights = mirror.next_blocks()
        began = time.perf_counter()
        mirror.commit(number)
        seconds = time.perf_counter() - began
        share = history.note(weights)
        assert mirror.hashes() == engine.shard_hashes(dtype)
        receivers = list(followers)
        if number >= next_turn:
            receivers.append(slow)
            next_turn = number + 1 + chooser.randint(0, MOST_LAG)
        if number in (case.num_syncs // 2, case.num_syncs):
            receivers.append(Receiver(case.model, case.tp_sizes[-1], dtype))
        byte_counts = [check_receiver(each, mirror, history) for each in receivers]
        result.num_checks += len(receivers)
        if number == 0:
            result.whole_bytes = byte_counts[0]
            continue
        assert share == mirror.changed_fraction
        result.shares.append(share)
        result.byte_counts.append(byte_counts[0])
        result.commit_seconds.append(seconds)
        result.update_seconds.append(followers[0].seconds)
    return result


def check_receiver(receiver: Receiver, mirror: WeightMirror, history: History) -> int:
    """Let a receiver follow, compare bytes and hashes; return the bytes.

    WeightSyncError for a hash that differs.
    """
    expected = history.expected_bytes(receiver)
    num_bytes = receiver.follow(mirror)
    assert num_bytes == expected, f"{num_bytes} bytes, planned {expected}"
    compare_hashes(mirror.hashes(), receiver.hashes(), mirror.version)
    return num_bytes


def row_of(result: Result) -> str:
    """A result as a row of a Markdown table."""
    case = result.case
    number = len(result.shares)
    first = result.shares[0]
    middle = sorted(result.shares)[number // 2]
    most = max(result.shares)
    mean_bytes = sum(result.byte_counts) / number
    commit = 1e3 * sum(result.commit_seconds) / number
    update = 1e3 * sum(result.update_seconds) / number
    return (
        f"| {Path(case.model).name} | {case.precision} | {case.lr:g} | {number} "
        f"| {first:.2%} | {middle:.2%} | {most:.2%} | {mean_bytes:,.0f} | {result.whole_bytes:,} "
        f"| {mean_bytes / result.whole_bytes:.1%} | {commit:.1f} | {update:.1f} "
        f"| {result.num_checks} |"
    )


HEADER = (
    "| model | precision | lr | syncs | changed: first | median | most | bytes (mean) "
    "| bytes of all | part | compare, ms | update, ms | checks |\n" + "|---" * 13 + "|"
)


def data_path(name: str) -> str:
    """The file of rows: a path, or a name inside $SPMDFLOW_DATA."""
    if Path(name).is_file():
        return name
    return str(Path(os.environ.get("SPMDFLOW_DATA", ".")) / name)


def main() -> None:
    """Run all cases; print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=str(ARITHMETIC / "model"))
    parser.add_argument("--data", default=str(ARITHMETIC / "train.jsonl"))
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 3e-6, 1e-5, 3e-5, 1e-4])
    parser.add_argument("--precision", nargs="+", default=["bfloat16"])
    parser.add_argument("--syncs", type=int, default=500, help="of each case")
    parser.add_argument("--most-tokens", type=int, default=64, help="of a row")
    parser.add_argument("--tp-sizes", type=int, nargs="+", default=[1, 2], help="of receivers")
    parser.add_argument("--json", action="store_true", help="print JSON, with each sync")
    args = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if not args.json:
        print(HEADER)
    results = []
    for precision in args.precision:
        for lr in args.lr:
            case = Case(
                model=args.model,
                data=data_path(args.data),
                lr=lr,
                precision=precision,
                num_syncs=args.syncs,
                most_tokens=args.most_tokens,
                tp_sizes=args.tp_sizes,
            )
            results.append(run_case(case))
            if not args.json:
                print(row_of(results[-1]), flush=True)
    if args.json:
        print(json.dumps([asdict(each) for each in results]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
