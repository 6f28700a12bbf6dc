"""The message at the end of a run: where its trained models are, and a command that uses one."""

from __future__ import annotations

import shlex
from pathlib import Path

from spmdflow.checkpoint.manifest import order_of
from spmdflow.checkpoint.run_dir import EXPORT

_RUN = "torchrun --standalone --nproc-per-node 1 -m spmdflow.run"


def trained_models_text(run_dir: Path, *, has_evaluation: bool) -> str | None:
    """Return one line: step and folder of the models that a run saved, and a command that uses one.

    For an adapter, the command merges it; without an exported model, the command exports one from
    the checkpoint. Only exports of the checkpoint in `latest` count. has_evaluation: whether the
    run's settings say how to evaluate its actor. None if there is no valid `latest`.
    """
    latest = run_dir / "checkpoints" / "latest"
    if not latest.is_file():
        return None
    name = latest.read_text(encoding="utf-8", errors="replace").strip()
    order = order_of(name)
    if order is None:
        return None
    step = order[0]
    links = []
    for link in sorted((run_dir / EXPORT).glob("*")):
        if name in link.resolve().parts:
            links.append(link)
    models = {}
    for link in links:
        if (link / "config.json").is_file():
            models[link.name] = link
    adapters = []
    for link in links:
        if (link / "adapter_config.json").is_file():
            adapters.append(link)
    if adapters:
        return (
            f"the adapter after step {step} is in {adapters[0]}; merge it into a full model: "
            f"python -m spmdflow.export {shlex.quote(str(run_dir))} --to FOLDER"
        )
    if models:
        role = "actor" if "actor" in models else next(iter(models))
        folders = ", ".join(str(folder) for folder in models.values())
        use = _usage_text(role, models[role], run_dir if has_evaluation else None)
        return f"the model after step {step} is in {folders}, in the Hugging Face format; {use}"
    return (
        f"the checkpoint after step {step} is in {run_dir / 'checkpoints' / name}; write a model "
        f"of it: python -m spmdflow.export {shlex.quote(str(run_dir))} --model NAME --to FOLDER"
    )


def _usage_text(role: str, folder: Path, evaluated_run: Path | None) -> str:
    """Return what to do next with a role's model, as a text with a command.

    A reward_model: train a policy with it. Any other: evaluate it, with the settings of
    evaluated_run (RUN_DIR) if given, otherwise with data and reward to be filled in.
    """
    path = shlex.quote(str(folder))
    if role == "reward_model":
        return f"train a policy with it: {_RUN} ppo reward.model.path={path}"
    if evaluated_run is not None:
        return f"evaluate it: {_RUN} evaluate {shlex.quote(str(evaluated_run / 'config.yaml'))}"
    return (
        f"evaluate it: {_RUN} evaluate actor.model.path={path} data.eval_path=FILE "
        f"reward.function=FUNCTION"
    )
