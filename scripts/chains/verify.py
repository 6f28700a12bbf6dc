"""Whether a disturbed run kept its promise.

Exact mode: rows, metrics but times, and weights equal those of an undisturbed run bit for bit.

Fast mode: rows go on over weight syncs, so which weights draw a token depends on the time. Each
token is drawn again here, by vLLM in process, with the weights of its recorded version and the
row's noise: it must be the same but for near ties, and its log-probability within 1e-5, or within
what float32 rounds (such rows are counted). Whether two tokens tie is decided by transformers.

Both: every row is trained exactly once, in its step, and no token is older than the bound.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from spmdflow.config.schema import RolloutConfig
from spmdflow.data.row_id import seed_of
from spmdflow.export import checkpoint_at, export
from spmdflow.rollout.generator import Replica, Request, take_folder_weights
from spmdflow.rollout.sampling import Sampling, uniform
from spmdflow.rollout.vllm import VllmGenerator

LOG_PROB_LIMIT = 1e-5
"""Larger differences of log-probabilities are counted."""
ROUNDING_LIMIT = 3e-5
"""Larger ones break the promise. Two correct forwards in float32 differ by so much: at logits of
21, as the bundled model has them, transformers' differ from float64 by up to 1.6e-5."""
NEAR_TIE = 1e-5
"""A draw whose random number is so close to the border between two tokens may give the other."""
_TIMES = ("time/", "perf/", "servers/", "transfer/", "memory/", "rollout/synced_bytes")
"""Metrics that depend on time or on servers."""


@dataclass
class Verdict:
    """What was found out about a run."""

    problems: list[str] = field(default_factory=list)
    num_rows: int = 0
    num_tokens: int = 0
    num_near_ties: int = 0
    num_above: int = 0
    """Rows with a log-probability that differs by more than LOG_PROB_LIMIT."""
    largest_gap: float = 0.0
    """Of the log-probabilities."""
    largest_age: int = 0

    @property
    def is_kept(self) -> bool:
        """Whether the promise holds."""
        return not self.problems


def read_rows(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Row id -> step, version, prompt, response, log-probabilities and versions of its tokens.

    ValueError if a row was trained twice.
    """
    rows: dict[int, dict[str, Any]] = {}
    for path in sorted((run_dir / "rows").glob("step-*.pt")):
        table = torch.load(path, weights_only=True)
        for index, row in enumerate(table["row_ids"].tolist()):
            if row in rows:
                raise ValueError(f"row {row} was trained twice")
            rows[row] = {
                "step": table["step"],
                "version": table["version"],
                "prompt": table["prompts"][index],
                "tokens": table["responses"][index],
                "log_probs": table["rollout_log_probs"][index],
                "versions": table["token_versions"][index],
            }
    return rows


def verify_exact(run_dir: Path, reference: Path) -> Verdict:
    """Compare a run in exact mode with an undisturbed one."""
    verdict = Verdict()
    rows = read_rows(run_dir)
    expected = read_rows(reference)
    if rows.keys() != expected.keys():
        verdict.problems.append(f"other rows: {len(rows)}, expected {len(expected)}")
    for row in rows.keys() & expected.keys():
        verdict.num_rows += 1
        verdict.num_tokens += len(rows[row]["tokens"])
        for name, value in expected[row].items():
            actual = rows[row][name]
            same = torch.equal(actual, value) if isinstance(value, Tensor) else actual == value
            if not same:
                verdict.problems.append(f"row {row}: {name} differs")
    verdict.problems += different_metrics(run_dir, reference)
    for file in sorted((reference / "export").rglob("*.safetensors")):
        other = run_dir / file.relative_to(reference)
        if not other.is_file() or other.read_bytes() != file.read_bytes():
            verdict.problems.append(f"{file.name} differs")
    return verdict


@dataclass(frozen=True)
class _Segment:
    """The tokens of a row that one version of the weights has drawn."""

    row: int
    start: int
    stop: int


def verify_fast(run_dir: Path, *, model: str, seed: int, max_staleness: int) -> Verdict:
    """Draw every token of a run again, with the weights that the run says it was drawn with."""
    verdict = Verdict()
    rows = read_rows(run_dir)
    segments: dict[int, list[_Segment]] = defaultdict(list)
    for row, facts in rows.items():
        versions = facts["versions"].tolist()
        verdict.largest_age = max(verdict.largest_age, facts["version"] - min(versions))
        start = 0
        for version, some in groupby(versions):
            stop = start + len(list(some))
            segments[version].append(_Segment(row, start, stop))
            start = stop
        verdict.num_rows += 1
    settings = RolloutConfig(engine="vllm", dtype="float32", max_batch_size=16)
    generator = VllmGenerator(settings, model, torch.device("cpu"), Replica.alone())
    for version in sorted(segments):
        folder = _folder_of_version(run_dir, model, version)
        take_folder_weights(generator, str(folder), verify=False)
        generator.renew(version)
        _redraw(verdict, generator, rows, segments[version], seed=seed, folder=folder)
    generator.close()
    if verdict.largest_age > max_staleness:
        verdict.problems.append(f"a token of age {verdict.largest_age}, bound {max_staleness}")
    return verdict


def _redraw(
    verdict: Verdict,
    generator: VllmGenerator,
    rows: Mapping[int, Mapping[str, Any]],
    segments: Sequence[_Segment],
    *,
    seed: int,
    folder: Path,
) -> None:
    """Draw segments again, and compare them. folder: the model of their version."""
    segment_of = {}
    for segment in segments:
        facts = rows[segment.row]
        before = facts["tokens"][: segment.start]
        request = Request(
            torch.cat([facts["prompt"], before]),
            seed_of(seed, "generate", facts["step"], segment.row),
            Sampling(max_new_tokens=segment.stop - segment.start),
            num_drawn=segment.start,
        )
        segment_of[generator.add(request)] = segment, request
    num_left = len(segment_of)
    while num_left:
        for finished in generator.step():
            num_left -= 1
            segment, request = segment_of[finished.id]
            facts = rows[segment.row]
            tokens = facts["tokens"][segment.start : segment.stop]
            log_probs = facts["log_probs"][segment.start : segment.stop]
            size = min(len(tokens), len(finished.tokens))
            differs = (finished.tokens[:size] != tokens[:size]).nonzero().flatten().tolist()
            same = differs[0] if differs else size
            if same:
                gap = float((finished.log_probs[:same] - log_probs[:same]).abs().max())
                verdict.largest_gap = max(verdict.largest_gap, gap)
                verdict.num_above += gap > LOG_PROB_LIMIT
                if gap > ROUNDING_LIMIT:
                    verdict.problems.append(f"row {segment.row}: log-probs off by {gap:.2g}")
            verdict.num_tokens += len(tokens)
            if differs and is_near_tie(folder, request, tokens[:same]):
                verdict.num_near_ties += 1
            elif differs or len(finished.tokens) != len(tokens):
                verdict.problems.append(f"row {segment.row}: token {same} has other noise")


def is_near_tie(folder: Path, request: Request, drawn: Tensor) -> bool:
    """Whether the token after `drawn` lies so close to a border that rounding may decide."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.cat([request.prompt, drawn])[None]).logits[0, -1]
    place = torch.tensor([request.num_drawn + len(drawn)])
    number = uniform(torch.tensor([request.seed]), place)
    borders = logits.double().softmax(-1).cumsum(-1)
    return float((borders - number).abs().min()) < NEAR_TIE


def check_each_once(run_dir: Path, *, steps: int, rows_per_step: int) -> list[str]:
    """Problems if not every step has trained its rows, each exactly once."""
    try:
        rows = read_rows(run_dir)
    except ValueError as err:
        return [str(err)]
    problems = []
    for step in range(1, steps + 1):
        number = sum(facts["step"] == step for facts in rows.values())
        if number != rows_per_step:
            problems.append(f"step {step} trained {number} rows, expected {rows_per_step}")
    return problems


def _folder_of_version(run_dir: Path, model: str, version: int) -> Path:
    """The model of a version: that of the folder, or of the checkpoint of that step."""
    if not version:
        return Path(model)
    folder = run_dir / "versions" / str(version)
    if not folder.exists():
        export(checkpoint_at(run_dir / "checkpoints" / f"step-{version}"), folder, model="actor")
    return folder


def different_metrics(run_dir: Path, reference: Path) -> list[str]:
    """Metrics, but times and those of servers, that differ."""
    problems = []
    for ours, theirs in zip(metrics_of(run_dir), metrics_of(reference), strict=False):
        for key in sorted(ours.keys() | theirs.keys()):
            if not key.startswith(_TIMES) and ours.get(key) != theirs.get(key):
                problems.append(f"step {ours['step']}: {key} differs")
    if len(metrics_of(run_dir)) != len(metrics_of(reference)):
        problems.append("another number of steps")
    return problems


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]
