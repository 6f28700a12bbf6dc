"""How far log-probabilities and greedy tokens of a real model are from plain transformers.

    .venv/bin/python -m tests.distributed.real_logprobs    # writes docs/lab/real_logprobs.json

SmolLM2-135M-Instruct in float32: 30 layers, 9 heads, 3 of keys and values, 49,152 words, tied. The
rows are dialogues of hh-rlhf, as `scripts/make_dialogues.py` reads them. The reference is a forward
of transformers over each row alone, and its `generate` on each prompt alone.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from tensordict import TensorDict

from scripts.learn.curves import hardware
from scripts.learn.runs import commit_of_code
from scripts.make_dialogues import FILE, rows_of
from spmdflow.data.ragged import lengths_of, ragged_from_rows
from spmdflow.data.ragged import rows_of as tensors_of
from tests.forked import torchrun
from tests.smollm2 import (
    END,
    SMOLLM2,
    model_of_transformers,
    plain_log_probs,
    write_scored,
)

PAGE = Path(__file__).parents[2] / "docs" / "lab" / "real_logprobs.json"
PROGRAMS = Path(__file__).parent / "programs"

ENGINES = (
    "fsdp:t1:1",
    "fsdp:t1:2",
    "zero1:t1:2",
    "zero2:t1:2",
    "zero3:t1:2",
    "megatron:t1:1",
    "megatron:t3:3",
    "megatron:p2:2",
    "megatron:t3p2:6",
)
"""Kind, layout and ranks of each train engine."""
FORMS = ("packed", "padded")
GENERATORS = ("builtin", "vllm t1", "vllm t3")

DIALOGUES = 32
BOTH = 8
"""So many questions come with both of their answers, so that packed rows share prompts."""
LONGEST = 160
"""Tokens of a dialogue: template, question and answer."""
PROMPTS = 16
NEW_TOKENS = 48
TOLERANCE = 1e-4
NEAR = 1e-3
"""A token is a near tie if transformers' second log-probability is closer than this to the first.
Sums in another order may then choose the other one."""
MOST_NEAR_TIES = 2
"""Of the rows of a generator."""


def read_dialogues() -> TensorDict:
    """Prompts by the model's template, and the last answers of the first short dialogues."""
    file = Path(os.environ["SPMDFLOW_DATA"]) / "hh-rlhf" / FILE
    tokenizer = transformers.AutoTokenizer.from_pretrained(SMOLLM2, local_files_only=True)
    prompts: list[torch.Tensor] = []
    responses: list[torch.Tensor] = []
    for number, (prompt, answers) in enumerate(_short_questions(file, tokenizer)):
        for answer in answers[: 2 if number < BOTH else 1]:
            prompts.append(torch.tensor(prompt))
            responses.append(torch.tensor(answer))
        if len(prompts) >= DIALOGUES:
            break
    columns = {"prompts": ragged_from_rows(prompts), "responses": ragged_from_rows(responses)}
    return TensorDict(columns, batch_size=[len(prompts)])


def _short_questions(file: Path, tokenizer: Any) -> Iterator[tuple[list[int], list[list[int]]]]:
    """Tokens of each prompt and of its better and worse answer, where all are short enough."""
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        for line in lines:
            rows = rows_of(json.loads(line))
            if rows is None:
                continue
            pair = rows["pairs"]
            prompt = tokenizer.apply_chat_template(
                pair["prompt"], add_generation_prompt=True, return_dict=False
            )
            answers = []
            for name in ("chosen", "rejected"):
                answers.append([*tokenizer(pair[name]).input_ids, END])
            if len(prompt) + max(map(len, answers)) <= LONGEST:
                yield prompt, answers


def measure_engines(rows: TensorDict, folder: Path) -> dict[str, dict[str, list[float]]]:
    """Case -> packed or padded -> the largest difference of each row's log-probabilities.

    The rows and transformers' log-probabilities stay in folder/scored.json.
    """
    write_scored(rows, folder / "scored.json")
    program = str(PROGRAMS / "smollm2_engine.py")
    words = ["--nproc-per-node=6", program, str(folder), *ENGINES]
    torchrun(words, folder / "engines.txt", seconds=1500)
    return json.loads((folder / "results.json").read_text())


@dataclass(frozen=True)
class Greedy:
    """The likeliest response to a prompt, by transformers."""

    tokens: list[int]
    log_probs: list[float]
    margins: list[float]
    """How far the second largest log-probability is below each of them."""


@dataclass
class Agreement:
    """How a generator's responses agree with those of transformers."""

    tokens: int = 0
    """Compared ones: of each row, up to the first that differs."""
    gap: float = 0.0
    """The largest difference of their log-probabilities."""
    near_ties: list[float] = field(default_factory=list)
    """Transformers' margin at the first token that differs, of each row that has one."""
    smallest_margin: float = math.inf
    """Transformers' smallest margin at a compared token."""
    faults: list[str] = field(default_factory=list)
    """What else differs."""


def measure_generators(rows: TensorDict, folder: Path) -> dict[str, Agreement]:
    """Generator -> how its responses agree with those of transformers."""
    prompts: list[list[int]] = []
    for row in tensors_of(rows["prompts"]):
        if row.tolist() not in prompts:
            prompts.append(row.tolist())
    prompts = prompts[:PROMPTS]
    (folder / "prompts.json").write_text(json.dumps(prompts))
    program = str(PROGRAMS / "smollm2_generators.py")
    words = ["--nproc-per-node=3", program, str(folder), str(NEW_TOKENS)]
    torchrun(words, folder / "generators.txt", seconds=1500, with_vllm=True)
    expected = greedy_responses(prompts)
    found = {}
    for name, answers in json.loads((folder / "responses.json").read_text()).items():
        found[name] = compare(answers["tokens"], answers["log_probs"], expected)
    return found


@torch.no_grad()
def greedy_responses(prompts: Sequence[Sequence[int]]) -> list[Greedy]:
    """The response of transformers to each prompt, generated alone."""
    model = model_of_transformers()
    responses = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.cat(made.logits).log_softmax(-1).topk(2)
        tokens = made.sequences[0, len(prompt) :].tolist()
        assert tokens == best.indices[:, 0].tolist()
        margins = best.values[:, 0] - best.values[:, 1]
        responses.append(Greedy(tokens, best.values[:, 0].tolist(), margins.tolist()))
    return responses


def compare(
    tokens: Sequence[Sequence[int]],
    log_probs: Sequence[Sequence[float]],
    expected: Sequence[Greedy],
) -> Agreement:
    """How responses agree with transformers' up to the first token of each that differs."""
    found = Agreement()
    for number, (ours, values, row) in enumerate(zip(tokens, log_probs, expected, strict=True)):
        same = 0
        while same < min(len(ours), len(row.tokens)) and ours[same] == row.tokens[same]:
            same += 1
        found.tokens += same
        for value, plain in zip(values[:same], row.log_probs[:same], strict=True):
            gap = abs(value - plain)
            found.gap = max(found.gap, math.inf if math.isnan(gap) else gap)
        found.smallest_margin = min([found.smallest_margin, *row.margins[:same]])
        if same == len(ours) == len(row.tokens):
            continue
        if same < min(len(ours), len(row.tokens)) and row.margins[same] < NEAR:
            found.near_ties.append(row.margins[same])
        else:
            found.faults.append(f"row {number}, token {same}: {ours} instead of {row.tokens}")
    return found


def float64_gap(rows: TensorDict) -> float:
    """How far transformers' own float32 is from float64: what float32 can promise at all."""
    model = model_of_transformers()
    single = plain_log_probs(model, rows)
    model = model.double()
    for part in model.modules():
        if type(part).__name__.endswith("RMSNorm"):  # transformers' own rounds to float32
            part.forward = partial(_norm, part)
    gaps = []
    for ours, exact in zip(single, plain_log_probs(model, rows), strict=True):
        gaps.append(float((ours - exact).abs().max()))
    return max(gaps)


def _norm(part: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, part.weight.shape, part.weight, part.variance_epsilon)


def largest_gaps(engines: Mapping[str, Mapping[str, Sequence[float]]]) -> list[dict[str, Any]]:
    """A record for each engine and layout: the largest difference of all rows."""
    records = []
    for word, forms in engines.items():
        kind, layout, ranks = word.split(":")
        record: dict[str, Any] = {"engine": kind, "layout": layout, "ranks": int(ranks)}
        for form, gaps in forms.items():
            record[form] = _rounded(max(gaps))
        records.append(record)
    return records


def recorded(name: str, found: Agreement) -> dict[str, Any]:
    """A record of a generator."""
    assert found.faults == [], (name, found.faults)
    return {
        "generator": name,
        "prompts": PROMPTS,
        "equal_tokens": found.tokens,
        "near_ties": len(found.near_ties),
        "log_probs": _rounded(found.gap),
        "smallest_margin": _rounded(found.smallest_margin),
    }


def _rounded(gap: float) -> float:
    return float(f"{gap:.1e}")


def main() -> None:
    """Measure all of it and write the page."""
    began = time.monotonic()
    rows = read_dialogues()
    with tempfile.TemporaryDirectory() as folder:
        engines = measure_engines(rows, Path(folder))
        generators = measure_generators(rows, Path(folder))
    seconds = round(time.monotonic() - began)
    made = {
        "command": "python -m tests.distributed.real_logprobs",
        "commit": commit_of_code(),
        "hardware": hardware(),
        "seconds": seconds,
        "model": SMOLLM2.name,
        "dtype": "float32",
        "dialogues": len(rows),
        "response_tokens": int(lengths_of(rows["responses"]).sum()),
        "transformers_to_float64": _rounded(float64_gap(rows)),
        "engines": largest_gaps(engines),
        "generators": [recorded(name, found) for name, found in generators.items()],
    }
    PAGE.write_text(page_text(made), encoding="utf-8")


def page_text(made: Mapping[str, Any]) -> str:
    """JSON with a line for each value, and for each record of an engine or generator."""
    lines = []
    for name, value in made.items():
        text = json.dumps(value)
        if isinstance(value, list):
            text = "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
        lines.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    main()
