"""The plan of every script and recipe in algos/ at two commits, compared as JSON.

Each script with its own YAML is planned for 4 ranks of a CPU node with its data, and for 8 H100.
Recipes for real models are planned from the sizes of a config.json, for the number of GPUs that
launch/README.md says. Scripts with several models are also planned with placement=auto; the
placements, layouts and settings that the search chose are part of the JSON.

Values must be equal bit for bit. Sentences for a reader may be worded differently; they are counted
and printed apart. The number of a script's line is replaced by the text of that line.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from compare.checkout import Checkout, end_of_log, run_program
from compare.equality import JsonRules, compare_json

PROGRAM = Path(__file__).parent / "_planning.py"
EQUAL = "equal"
REWORDED = "equal, other words"
REFUSED = "refused by both"
PASSED = (EQUAL, REWORDED, REFUSED)
RULES = JsonRules(
    omitted=(
        "planning_seconds",  # a clock
        "auto.seconds_searched",  # a clock
        "checks.rows",  # the row planner is proved in tests (tests/proofs/rows.py)
        "checks.batches",  # so are the mini-batches that it cuts (tests/proofs/batches.py)
    ),
    worded=(
        "assumed",
        "auto.best.why",
        "chosen.why",
        "findings.text",
        "missing_here",
        "not_predicted",
        "weights.note",
    ),
    renamed={},
)
"""What the plans of two commits need not have in common; renamed keys are added on purpose only."""
_SECONDS = 3000.0
"""Limit of all plans of one commit together."""
_SHOWN = 10
"""Differences of a plan that are printed."""
_QWEN = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}

Row = dict[str, Any]
Plans = Mapping[str, Any]
"""Case -> what `_planning` writes."""


class RealModel(NamedTuple):
    """Sizes of a model that a recipe is made for, and the number of GPUs."""

    family: dict[str, Any]
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    world: int

    def config(self) -> dict[str, Any]:
        """Its config.json."""
        return {
            **self.family,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 32768,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.ffn,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": self.hidden < 1000,
        }


REAL_MODELS = {
    "grpo_gsm8k": RealModel(_QWEN, 896, 24, 14, 2, 4864, 151936, world=1),
    "grpo_countdown": RealModel(_QWEN, 896, 24, 14, 2, 4864, 151936, world=1),
    "grpo_7b": RealModel(_QWEN, 3584, 28, 28, 4, 18944, 152064, world=8),
    "grpo_32b": RealModel(_QWEN, 5120, 64, 40, 8, 27648, 152064, world=64),
    "ppo_70b": RealModel(_LLAMA, 8192, 80, 64, 8, 28672, 128256, world=128),
}
WITHOUT_PLACEMENT = ("evaluate", "sft", "reward_model", "grpo_agent")
"""Scripts that are not planned with placement=auto."""
AUTO_WORLD = 8
PAIRS = {"prompt": "", "chosen": "Once upon a time.", "rejected": "The end.", "response": "Yes."}
"""A row of the files that the recipes of stories make beforehand."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which scripts and recipes."""
    parser.add_argument("--recipes", nargs="+", metavar="NAME", help="YAML files of algos/")


def compare(arguments: argparse.Namespace, old: Checkout, new: Checkout, folder: Path) -> list[Row]:
    """A row for each plan."""
    results = []
    for side, checkout in (("old", old), ("new", new)):
        cases = cases_of(checkout.root, folder)
        if arguments.recipes:
            chosen = [name for name in cases if name.split()[0] in arguments.recipes]
            cases = {name: cases[name] for name in chosen}
        print(f"{side}: {len(cases)} plans", flush=True)
        results.append(run_plans(cases, checkout, folder / side))
    before, after = results
    rows = []
    for name in sorted({*before, *after}):
        rows.append(_compare_plan(name, before, after, (old.root, new.root)))
    return rows


def cases_of(root: Path, folder: Path) -> dict[str, list[str]]:
    """Name of a case -> words of `python -m spmdflow.plan`.

    Writes the models and rows that some recipes need into the folder.
    """
    cases = {}
    for path in sorted((root / "algos").glob("*.yaml")):
        recipe = path.stem
        words = [f"algos/{script_of(recipe, root)}.py", f"algos/{recipe}.yaml", "--json"]
        if recipe in REAL_MODELS:
            world = REAL_MODELS[recipe].world
            words += [*_real_models(recipe, folder), "--hardware=h100", "--no-data"]
            cases[f"{recipe} {world} h100"] = [*words, f"--world={world}"]
            cases[f"{recipe} auto"] = [*words, f"--world={max(world, 2)}", "placement=auto"]
        elif recipe.endswith("_stories"):
            if "SPMDFLOW_DATA" in os.environ:
                words += [*_story_rows(recipe, folder), "--hardware=cpu", "--no-data"]
                cases[f"{recipe} 2 cpu"] = [*words, "--world=2"]
        else:
            cases[f"{recipe} 4 cpu"] = [*words, "--world=4", "--hardware=cpu"]
            words += ["--hardware=h100", "--no-data", f"--world={AUTO_WORLD}"]
            cases[f"{recipe} {AUTO_WORLD} h100"] = words
            if recipe not in WITHOUT_PLACEMENT:
                cases[f"{recipe} auto"] = [*words, "placement=auto"]
    return cases


def script_of(recipe: str, root: Path) -> str:
    """The script of a YAML file: the longest name that its own begins with."""
    stems = [path.stem for path in (root / "algos").glob("*.py")]
    return max((stem for stem in stems if f"{recipe}_".startswith(f"{stem}_")), key=len)


def _real_models(recipe: str, folder: Path) -> list[str]:
    """Settings that name folders with a config.json alone, which are written."""
    config = REAL_MODELS[recipe].config()
    configs = {"actor": config}
    if recipe.startswith("ppo"):
        classifier = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
        configs["reward"] = config | classifier
    settings = []
    for role, values in configs.items():
        path = folder / "models" / recipe / role
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(values))
        settings.append(f"{role}.model.path={path}")
    return settings


def _story_rows(recipe: str, folder: Path) -> list[str]:
    """Settings that name a file of rows instead of the ones that prepare_stories.py makes."""
    if recipe.startswith(("ppo", "grpo")):
        return []
    path = folder / "rows.jsonl"
    path.write_text((json.dumps(PAIRS) + "\n") * 64)
    return [f"data.train_path={path}", f"data.eval_path={path}"]


def run_plans(cases: Mapping[str, list[str]], checkout: Checkout, folder: Path) -> Plans:
    """Plan all cases in one process of the checkout."""
    folder.mkdir(parents=True, exist_ok=True)
    work = folder / "plans.work.json"
    out = folder / "plans.json"
    log = folder / "plans.log"
    work.write_text(json.dumps({"root": str(checkout.root), "cases": cases}))
    status = run_program(checkout, [str(PROGRAM), str(work), str(out)], log, seconds=_SECONDS)
    if status != 0:
        print(f"{checkout.text}: planning ended with status {status}\n{end_of_log(log)}")
    if not out.exists():
        return {}
    plans: Plans = json.loads(out.read_text())
    return plans


def _compare_plan(name: str, old: Plans, new: Plans, roots: tuple[Path, Path]) -> Row:
    """Compare one case, and print what differs."""
    if name not in old or name not in new:
        only = "new" if name in new else "old"
        return _row(name, 0.0, 0.0, f"only in {only}", "")
    seconds = (old[name]["seconds"], new[name]["seconds"])
    plans = []
    for side, root in zip((old, new), roots):
        plans.append(to_neutral(side[name]["plan"], root))
    plans[0] = with_typed_settings(plans[0])
    statuses = (old[name]["status"], new[name]["status"])
    if statuses[0] != statuses[1]:
        detail = (old[name]["error"] or new[name]["error"]).strip()
        return _row(name, *seconds, f"exit codes {statuses[0]} and {statuses[1]}", detail)
    if plans[0] is None:
        return _row(name, *seconds, REFUSED, old[name]["error"].strip())
    values, words = compare_json(plans[0], plans[1], RULES)
    for difference in values[:_SHOWN]:
        print(f"{name}: {difference}")
    for difference in words[:_SHOWN]:
        print(f"{name}, other words: {difference}")
    if values:
        return _row(name, *seconds, f"{len(values)} differences", str(values[0]))
    if words:
        return _row(name, *seconds, REWORDED, str(words[0]))
    return _row(name, *seconds, EQUAL, "")


def to_neutral(plan: Any, root: Path) -> Any:
    """A plan without what names its checkout: paths, and numbers of lines of the script."""
    if plan is None:
        return None
    lines = Path(plan["script"]).read_text().splitlines()
    return _without_root(_with_line_texts(plan, lines), str(root))


def with_typed_settings(plan: Any) -> Any:
    """A plan in which the chosen settings that were small texts have the keys and values of today.

    engine.residency is now engine.offload, a list; rollout.kv_cache is rollout.kv_cache_gib.
    """
    if plan is None:
        return None
    chosen = []
    for choice in plan.get("chosen", ()):
        section, _, name = choice["key"].rpartition(".")
        if name == "residency":
            parts = [] if choice["value"] == "keep" else choice["value"].split(", ")
            chosen.append({**choice, "key": f"{section}.offload", "value": parts})
        elif name == "kv_cache":
            mib = int(choice["value"].removesuffix(" MiB"))
            chosen.append({**choice, "key": f"{section}.kv_cache_gib", "value": mib / 1024})
        else:
            chosen.append(choice)
    return {**plan, "chosen": chosen}


def _with_line_texts(value: Any, lines: list[str]) -> Any:
    """The value with texts of lines in place of their numbers, which are under the key line."""
    if isinstance(value, list):
        return [_with_line_texts(each, lines) for each in value]
    if not isinstance(value, dict):
        return value
    result = {}
    for key, each in value.items():
        if key == "line" and isinstance(each, int) and 0 < each <= len(lines):
            result[key] = lines[each - 1].strip()
        else:
            result[key] = _with_line_texts(each, lines)
    return result


def _without_root(value: Any, root: str) -> Any:
    """The value with relative paths."""
    text = json.dumps(value)
    return json.loads(text.replace(root, "ROOT"))


def _row(name: str, old_seconds: float, new_seconds: float, result: str, detail: str) -> Row:
    return {
        "plan": name,
        "old_s": old_seconds,
        "new_s": new_seconds,
        "result": result,
        "detail": _shorten(detail),
    }


def _shorten(text: str) -> str:
    """A text for a cell of the table."""
    line = text.replace("\n", " ")
    if len(line) > 120:
        return f"{line[:117]}..."
    return line
