"""Whether a disturbed run kept its promise.

Exact mode: rows, metrics but times, and weights equal those of an undisturbed run bit for bit.

Fast mode: rows go on over weight syncs, so which weights draw a token depends on the time. Each
token is drawn again here, by transformers, with the weights of its recorded version and the row's
noise: it must be the same but for near ties, and its log-probability within 1e-5.

Both: every row is trained exactly once, in its step, and no token is older than the bound.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from spmdflow.data.row_id import seed_of
from spmdflow.export import checkpoint_at, export
from spmdflow.rollout.sampling import Sampling, draw, uniform

LOG_PROB_LIMIT = 1e-5
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
    verdict.problems += _different_metrics(run_dir, reference)
    for file in sorted((reference / "export").rglob("*.safetensors")):
        other = run_dir / file.relative_to(reference)
        if not other.is_file() or other.read_bytes() != file.read_bytes():
            verdict.problems.append(f"{file.name} differs")
    return verdict


def verify_fast(run_dir: Path, *, model: str, seed: int, max_staleness: int) -> Verdict:
    """Draw every token of a run again, with the weights that the run says it was drawn with."""
    verdict = Verdict()
    rows = read_rows(run_dir)
    models: dict[int, Any] = {}
    for row, facts in rows.items():
        ages = facts["version"] - facts["versions"]
        verdict.largest_age = max(verdict.largest_age, int(ages.max()))
        row_seed = seed_of(seed, "generate", facts["step"], row)
        for version in facts["versions"].unique().tolist():
            if version not in models:
                models[version] = _load_version(run_dir, model, version)
            _verify_tokens(verdict, models[version], row, facts, version, row_seed)
        verdict.num_rows += 1
    if verdict.largest_age > max_staleness:
        verdict.problems.append(f"a token of age {verdict.largest_age}, bound {max_staleness}")
    return verdict


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


def _verify_tokens(
    verdict: Verdict, model: Any, row: int, facts: dict[str, Any], version: int, seed: int
) -> None:
    """Compare the tokens of a row that one version of the weights has drawn."""
    prompt = facts["prompt"]
    tokens = facts["tokens"]
    with torch.no_grad():
        logits = model(torch.cat([prompt, tokens])[None]).logits[0].float()
    places = (facts["versions"] == version).nonzero().squeeze(-1)
    some = logits[len(prompt) - 1 + places]
    seeds = torch.full_like(places, seed)
    drawn, _ = draw(some, Sampling(max_new_tokens=1), seeds, places)
    log_probs = some.log_softmax(-1).gather(-1, tokens[places][:, None]).squeeze(-1)
    gap = float((log_probs - facts["log_probs"][places]).abs().max())
    verdict.largest_gap = max(verdict.largest_gap, gap)
    verdict.num_tokens += len(places)
    if gap > LOG_PROB_LIMIT:
        verdict.problems.append(f"row {row}: a log-probability off by {gap:.2g}")
    for index in (drawn != tokens[places]).nonzero().flatten().tolist():
        bounds = some[index].double().softmax(-1).cumsum(-1)
        number = uniform(seeds[index : index + 1], places[index : index + 1])
        if float((bounds - number).abs().min()) < NEAR_TIE:
            verdict.num_near_ties += 1
        else:
            verdict.problems.append(f"row {row}: token {int(places[index])} has other noise")


def _load_version(run_dir: Path, model: str, version: int) -> Any:
    """The model of a version: that of the folder, or of the checkpoint of that step."""
    folder = Path(model)
    if version:
        folder = run_dir / "versions" / str(version)
        if not folder.exists():
            export(
                checkpoint_at(run_dir / "checkpoints" / f"step-{version}"), folder, model="actor"
            )
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _different_metrics(run_dir: Path, reference: Path) -> list[str]:
    """Metrics, but times and those of servers, that differ."""
    problems = []
    for ours, theirs in zip(_metrics_of(run_dir), _metrics_of(reference), strict=False):
        for key in sorted(ours.keys() | theirs.keys()):
            if not key.startswith(_TIMES) and ours.get(key) != theirs.get(key):
                problems.append(f"step {ours['step']}: {key} differs")
    if len(_metrics_of(run_dir)) != len(_metrics_of(reference)):
        problems.append("another number of steps")
    return problems


def _metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]
