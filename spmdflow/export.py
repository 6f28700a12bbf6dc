"""`python -m spmdflow.export CHECKPOINT_OR_RUN_DIR --to FOLDER`: a trained model of a checkpoint as
a sharded Hugging Face folder.

Any model that was trained, also one that the run does not export, as the critic. Adapters are
merged into the weights of the folder that the run had, or written alone, as a folder of peft's.
Needs no device and no more memory than some rows of a tensor; may run during training. Every byte
that is read is verified. A RUN_DIR means its latest checkpoint.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from spmdflow.checkpoint.disk import disk_errors, sync_tree
from spmdflow.checkpoint.export import MergedState, ModelExport
from spmdflow.checkpoint.manifest import CheckpointInfo, order_of, read_manifest
from spmdflow.checkpoint.run_dir import FOLDER, find_latest
from spmdflow.checkpoint.state import StateFiles
from spmdflow.errors import CheckpointError, SpmdflowError

FINISHED = 0
REFUSED = 2
DTYPES = ("float32", "bfloat16", "float16")


def main(words: Sequence[str] | None = None) -> int:
    """Export what the words of the command line say; exit code 2 if that cannot be done."""
    parser = argparse.ArgumentParser(prog="python -m spmdflow.export", description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="RUN_DIR or RUN_DIR/checkpoints/step-N")
    parser.add_argument("--model", help="actor, critic, ...: its name in the run (default: actor)")
    parser.add_argument("--to", type=Path, required=True, help="new or empty folder")
    parser.add_argument("--adapter", action="store_true", help="adapters alone, not merged")
    parser.add_argument("--dtype", choices=DTYPES, help="default: what the run computes with")
    options = parser.parse_args(words)
    try:
        info = checkpoint_at(options.checkpoint)
        role = export(
            info, options.to, model=options.model, dtype=options.dtype, adapter=options.adapter
        )
    except SpmdflowError as err:
        sys.stderr.write(f"spmdflow: {err}\n")
        return REFUSED
    sys.stdout.write(f"{role} after step {info.step}: {options.to}\n")
    return FINISHED


def checkpoint_at(path: Path) -> CheckpointInfo:
    """The checkpoint in a folder, or the latest one of a RUN_DIR; CheckpointError without one."""
    path = path.absolute()
    if order_of(path.name) is not None:
        return read_manifest(path)
    found = find_latest(path)
    if found is None:
        do = "give a RUN_DIR that has checkpoints, or one of them"
        raise CheckpointError.of("export", path, "a checkpoint", do)
    return found


def export(
    info: CheckpointInfo,
    folder: Path,
    *,
    model: str | None = None,
    dtype: str | None = None,
    adapter: bool = False,
) -> str:
    """Write a model of a checkpoint into folder; returns its name.

    model: by default the actor, or the only one. adapter: leave adapters apart from the weights.
    CheckpointError if the checkpoint has no such model, no adapters, is damaged or of an earlier
    version, or if folder holds files. ConfigError if the weights of adapters are gone.
    """
    trained = sorted({name.split("/")[0] for name in info.files if "/rank-" in name})
    role = model or (trained[0] if len(trained) == 1 else "actor")
    if role not in trained:
        expected = f"--model of {' or '.join(trained) or 'a trained model, of which it has none'}"
        raise CheckpointError.of("export", f"{role} of {info.folder}", expected, "choose one")
    with disk_errors("write", folder):
        if folder.exists() and any(folder.iterdir()):
            do = "choose another with --to"
            raise CheckpointError.of("export", f"{folder}, which holds files", "an empty one", do)
        state = StateFiles(info.folder / role)
        if "model" not in state.plain:
            got = f"{info.folder} of an earlier version"
            do = "copy RUN_DIR/export instead"
            raise CheckpointError.of("export", got, "one that says how to export it", do)
        source = Path(state.plain["model"]["source"])
        saved = [source, *sorted(info.folder.glob(f"*/{FOLDER}"))]
        model_folder = next((path for path in saved if path.is_dir()), None)
        if model_folder is None:
            sys.stderr.write(f"spmdflow: no tokenizer in {folder}: {source} is not there\n")
        precision = None if dtype is None else getattr(torch, dtype)
        has_adapters = "lora" in state.plain["model"]
        if adapter and not has_adapters:
            got = f"--adapter for {role} of {info.folder}, which was trained whole"
            raise CheckpointError.of("export", got, "adapters", "leave --adapter out")
        read: StateFiles | MergedState = state
        if has_adapters and not adapter:
            read = MergedState(state, source)
        ModelExport(read.plain, precision).write(read, folder, files_from=model_folder)
        sync_tree(folder)
    return role


if __name__ == "__main__":
    sys.exit(main())
