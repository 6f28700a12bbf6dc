"""Differences between the metrics, tensors and plans of two commits.

Numbers are equal if they have the same bits. Names that were changed on purpose are in maps from
the old name to the new one, so that each exception can be read in the file of its comparison.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

MISSING = "(missing)"
Metrics = Mapping[str, Any]
"""One line of metrics.jsonl."""


@dataclass(frozen=True)
class Difference:
    """One value that two commits do not share."""

    where: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.where}: {_shorten(self.old)} -> {_shorten(self.new)}"


def _shorten(value: Any) -> str:
    text = str(value)
    if len(text) > 80:
        return f"{text[:77]}..."
    return text


def read_metrics(run_dir: Path) -> list[Metrics]:
    """The lines of metrics.jsonl; none if the run wrote no step."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def compare_metrics(
    old: Sequence[Metrics],
    new: Sequence[Metrics],
    *,
    ignored: Sequence[str] = (),
    renamed: Mapping[str, str] | None = None,
) -> list[Difference]:
    """What differs, step by step. ignored: beginnings of names that are not compared.

    renamed: old name -> new name. If the new commit still writes the old name too, that number is
    compared as well.
    """
    differences = []
    if len(old) != len(new):
        differences.append(Difference("steps", len(old), len(new)))
    for before, after in zip(old, new):
        expected = expected_metrics(before, after, renamed or {})
        for name in sorted({*expected, *after}):
            if name.startswith(tuple(ignored)):
                continue
            one = expected.get(name, MISSING)
            other = after.get(name, MISSING)
            if not is_same_number(one, other):
                differences.append(Difference(f"step {before['step']} {name}", one, other))
    return differences


def expected_metrics(old: Metrics, new: Metrics, renamed: Mapping[str, str]) -> dict[str, Any]:
    """The old metrics under the names that the new commit should write."""
    expected = {}
    for name, value in old.items():
        if name not in renamed:
            expected[name] = value
            continue
        expected[renamed[name]] = value
        if name in new:
            expected[name] = value
    return expected


def is_same_number(one: Any, other: Any) -> bool:
    """Whether two values of a JSON file have the same bits. 0.0 and -0.0 differ."""
    return type(one) is type(other) and repr(one) == repr(other)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the safetensors files below a folder, under "FILE NAME"."""
    tensors = {}
    for path in sorted(folder.rglob("*.safetensors")):
        for name, tensor in load_file(path).items():
            tensors[f"{path.relative_to(folder)} {name}"] = tensor
    return tensors


def compare_tensors(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> list[Difference]:
    """Tensors that are missing, or that differ in shape, type or any bit."""
    differences = []
    for name in sorted({*old, *new}):
        if name not in old or name not in new:
            present = old.get(name, new.get(name))
            assert present is not None
            text = describe_tensor(present)
            one = text if name in old else MISSING
            other = text if name in new else MISSING
            differences.append(Difference(name, one, other))
        elif not has_same_bits(old[name], new[name]):
            differences.append(_tensor_difference(name, old[name], new[name]))
    return differences


def has_same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether shape, type and every bit agree, those of NaN too."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(_bytes_of(one), _bytes_of(other))


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def describe_tensor(tensor: Tensor) -> str:
    """Type and shape, such as "float32 [4, 8]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _tensor_difference(name: str, old: Tensor, new: Tensor) -> Difference:
    """Shapes or types if these differ, and otherwise the largest gap."""
    if old.shape != new.shape or old.dtype != new.dtype:
        return Difference(name, describe_tensor(old), describe_tensor(new))
    gap = (old.double() - new.double()).abs()
    where = f"{name}: {int((gap != 0).sum())} of {gap.numel()} numbers, the largest gap"
    return Difference(where, 0.0, float(gap.max()))


@dataclass(frozen=True)
class JsonRules:
    """What two JSON values need not have in common.

    A path names keys from the outermost in, joined by dots. Items of a list have no part in it:
    "calls.line" is the line of every call.
    """

    omitted: Collection[str] = ()
    """Paths that are not compared."""
    worded: Collection[str] = ()
    """Paths of sentences for a reader, or of maps to sentences: the words may differ."""
    renamed: Mapping[str, str] | None = None
    """Old path -> new name of its last key."""

    def is_worded(self, path: str) -> bool:
        """Whether a path holds a sentence."""
        return path in self.worded or path.rpartition(".")[0] in self.worded


def compare_json(old: Any, new: Any, rules: JsonRules) -> tuple[list[Difference], list[Difference]]:
    """(values that differ, sentences that are worded differently)."""
    values: list[Difference] = []
    words: list[Difference] = []
    _compare_json(old, new, rules, "", "", values, words)
    return values, words


def _compare_json(
    old: Any,
    new: Any,
    rules: JsonRules,
    path: str,
    where: str,
    values: list[Difference],
    words: list[Difference],
) -> None:
    """Append the differences below a path. where: the path with indices, for the reader."""
    if path in rules.omitted:
        return
    if isinstance(old, dict) and isinstance(new, dict):
        expected = _rename_keys(old, path, rules.renamed or {})
        for key in sorted({*expected, *new}):
            below = f"{path}.{key}" if path else key
            one = expected.get(key, MISSING)
            other = new.get(key, MISSING)
            _compare_json(one, other, rules, below, f"{where}.{key}", values, words)
    elif isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            values.append(Difference(f"{where} length", len(old), len(new)))
        for index, (one, other) in enumerate(zip(old, new)):
            _compare_json(one, other, rules, path, f"{where}[{index}]", values, words)
    elif not is_same_number(old, new):
        are_sentences = isinstance(old, str) and isinstance(new, str) and MISSING not in (old, new)
        if rules.is_worded(path) and are_sentences:
            words.append(Difference(where, old, new))
        else:
            values.append(Difference(where, old, new))


def _rename_keys(values: Mapping[str, Any], path: str, renamed: Mapping[str, str]) -> dict:
    """An old mapping under the new names of its keys."""
    result = {}
    for key, value in values.items():
        below = f"{path}.{key}" if path else key
        result[renamed.get(below, key)] = value
    return result
