"""Write a trained model of a checkpoint as a sharded Hugging Face folder.

Usage: python -m spmdflow.export CHECKPOINT_OR_RUN_DIR --to FOLDER. A RUN_DIR means its latest
checkpoint. Any trained model can be exported, including one that the run does not export, such as
the critic. Adapters are merged into the weights of the folder with which the run began, or written
alone in peft's format. It needs no device and only memory for some rows of a tensor, and may run
during training. Every byte that is read is verified.
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
    """Export the model that the command line describes, and print where it is.

    Returns 0, or 2 (with the reason on stderr) if that is impossible. words: default: sys.argv.
    """
    parser = argparse.ArgumentParser(prog="python -m spmdflow.export", description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="RUN_DIR or RUN_DIR/checkpoints/step-N")
    parser.add_argument(
        "--model", help="name of the model in the run, such as critic (default: actor)"
    )
    parser.add_argument("--to", type=Path, required=True, help="new or empty folder to write")
    parser.add_argument("--adapter", action="store_true", help="write only the adapters, unmerged")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="precision of the written weights (default: that of the run)",
    )
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
    """Return the checkpoint in a folder named step-N, otherwise the latest one of a RUN_DIR.

    Raises CheckpointError if there is none, or if its manifest is damaged.
    """
    path = path.absolute()
    if order_of(path.name) is not None:
        return read_manifest(path)
    latest = find_latest(path)
    if latest is None:
        do = "choose a RUN_DIR that has checkpoints, or one of its checkpoints"
        raise CheckpointError.of("export", path, "a checkpoint", do)
    return latest


def export(
    info: CheckpointInfo,
    folder: Path,
    *,
    model: str | None = None,
    dtype: str | None = None,
    adapter: bool = False,
) -> str:
    """Write a trained model of a checkpoint into folder and return the model's name.

    Adapters are merged into the base weights unless `adapter`. The tokenizer's files are copied
    from the base model or another model of the checkpoint; if both are gone, a warning says so.
    Raises CheckpointError if the checkpoint has no such model, no adapters, is damaged or of an
    earlier version, or if folder has files. Raises ConfigError if the base weights of adapters are
    gone.
    model: default: the only trained model, or the actor. dtype: None keeps that of the run.
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
            sys.stderr.write(
                f"spmdflow: {folder} gets no tokenizer, because {source} does not exist\n"
            )
        precision = None if dtype is None else getattr(torch, dtype)
        has_adapters = "lora" in state.plain["model"]
        if adapter and not has_adapters:
            got = f"--adapter for {role} of {info.folder}, which has no adapters"
            raise CheckpointError.of("export", got, "a model with adapters", "omit --adapter")
        read: StateFiles | MergedState = state
        if has_adapters and not adapter:
            read = MergedState(state, source)
        ModelExport(read.plain, precision).write(read, folder, files_from=model_folder)
        sync_tree(folder)
    return role


if __name__ == "__main__":
    sys.exit(main())
