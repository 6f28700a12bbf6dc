"""Frozen weights for episodes: the run's starting weights, a folder's, or those of a checkpoint.

They are generated with by the built-in generator on this rank, whatever generates for the policy.
"""

from __future__ import annotations

import logging
import tempfile
import time
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from spmdflow.checkpoint.export import MergedState, ModelExport
from spmdflow.checkpoint.manifest import order_of
from spmdflow.checkpoint.reading import hold_checkpoint
from spmdflow.checkpoint.run_dir import FOLDER
from spmdflow.checkpoint.state import StateFiles
from spmdflow.config.episode_models import (
    STEP_PREFIX,
    FrozenModel,
    ServerModel,
    episode_models,
    server_key,
)
from spmdflow.config.schema import TRUSTED_ROLES
from spmdflow.datasets.chat import ChatTemplate
from spmdflow.datasets.tokenizer import load_tokenizer
from spmdflow.episodes.frozen import LoadedWeights
from spmdflow.episodes.model_set import ModelForm, ModelSet
from spmdflow.episodes.named_model import KEY, SavedSteps
from spmdflow.episodes.recorder import Limits
from spmdflow.errors import CheckpointError
from spmdflow.rollout.builtin import BuiltinGenerator
from spmdflow.rollout.forward import end_tokens, vocab_size
from spmdflow.rollout.generator import take_folder_weights
from spmdflow.rollout.sampling import Sampling
from spmdflow.weights.peft_settings import PEFT_CONFIG
from spmdflow.worker_api.worker import WorkerContext

logger = logging.getLogger(__name__)

_POLICY_ROLE = "actor"


def chat_template(rollout: Any, tokenizer_path: str) -> ChatTemplate:
    """The chat template of a tokenizer, with the settings of a rollout section."""
    trusted = TRUSTED_ROLES if rollout.trusted_roles is None else rollout.trusted_roles
    return ChatTemplate(
        load_tokenizer(tokenizer_path),
        rollout.chat_template_arguments,
        date=rollout.chat_template_date,
        trusted_roles=trusted,
    )


def model_set(
    cfg: Any, context: WorkerContext, limits: Limits, chat: ChatTemplate, *, is_first: bool
) -> ModelSet | None:
    """Return the models of a role's settings that episodes may call; None if there are none.

    limits: of episodes with the policy. chat: its template. is_first: whether this is the first
    rank of a replica, which has the endpoint and needs the keys of servers. ConfigError as in
    `episode_models`, and if a key is not there.
    """
    models = episode_models(KEY, cfg.rollout.episode.models)
    if not models:
        return None
    keys = {}
    for name, model in models.items():
        if is_first and isinstance(model, ServerModel):
            key = server_key(f"{KEY}.{name}", model)
            if key is not None:
                keys[name] = key
    weights = _FrozenWeights(cfg, context, models, chat)
    return ModelSet(
        models=models,
        policy_limits=limits,
        run_sampling=Sampling.from_config(cfg.rollout),
        load=weights.load,
        form_of_entry=lru_cache(maxsize=None)(weights.form_of),
        steps=weights.steps,
        keys=keys,
    )


class _FrozenWeights:
    """Where the weights of frozen models are, and generators with them."""

    def __init__(self, cfg: Any, context: WorkerContext, models: Any, chat: ChatTemplate) -> None:
        self._cfg = cfg
        self._context = context
        self._models = models
        self._chat = chat

    def form_of(self, name: str) -> ModelForm:
        """Template, end tokens and vocabulary of a model: those of its own folder, if it has one,
        otherwise the policy's."""
        rollout = self._cfg.rollout
        path = self._own_path(name)
        if path is None:
            path = self._cfg.model.path
            tokenizer_path = rollout.tokenizer_path
            chat = self._chat
        else:
            tokenizer_path = path
            chat = chat_template(rollout, path)
        return ModelForm(chat, end_tokens(path), vocab_size(path), tokenizer_path)

    def steps(self) -> SavedSteps:
        """0 for the start of the run, and the steps of all checkpoints with the policy."""
        unsealed = []
        if self._context.run_dir is not None:
            for folder in (self._context.run_dir / "checkpoints").glob("step-*.tmp"):
                order = order_of(folder.stem)
                if order is not None:
                    unsealed.append(order[0])
        # the sealed ones last: one that is sealed meanwhile is found in one of the two
        return SavedSteps(sorted({0, *self._checkpoints()}), unsealed)

    def load(self, name: str) -> LoadedWeights:
        """Build a generator with the weights of a name. CheckpointError if they are gone."""
        begin = time.monotonic()
        path = self._own_path(name) or self._cfg.model.path
        step = 0
        if name.startswith(STEP_PREFIX):
            step = int(name.removeprefix(STEP_PREFIX))
        if step:
            generator = self._of_checkpoint(step)
        else:
            generator = self._of_folder(path, name)
        logger.info(
            "episodes: loaded %s (%s) in %.1f s",
            name,
            f"checkpoint of step {step}" if step else path,
            time.monotonic() - begin,
        )
        return LoadedWeights(generator, end_tokens(path))

    def _own_path(self, name: str) -> str | None:
        model = self._models.get(name)
        return model.path if isinstance(model, FrozenModel) else None

    def _of_folder(self, path: str, name: str) -> BuiltinGenerator:
        model = self._models.get(name)
        rollout = self._cfg.rollout
        if isinstance(model, FrozenModel) and model.max_batch_size is not None:
            rollout = replace(rollout, max_batch_size=model.max_batch_size)
        generator = BuiltinGenerator(rollout, path, self._context.device)
        take_folder_weights(generator, path, verify=False)
        return generator

    def _of_checkpoint(self, step: int) -> BuiltinGenerator:
        """The policy's weights of a checkpoint; adapters are merged into those of their base."""
        found = self._checkpoints().get(step)
        if found is None:
            raise _missing(step)
        name = f"{STEP_PREFIX}step"
        with hold_checkpoint(found / FOLDER) as is_there:
            if not is_there:
                raise _missing(step)
            if not (found / FOLDER / PEFT_CONFIG).is_file():
                return self._of_folder(str(found / FOLDER), name)
            merged = MergedState(StateFiles(found), Path(self._cfg.model.path))
            with tempfile.TemporaryDirectory(prefix="frozen-", dir=self._context.run_dir) as folder:
                export = ModelExport(merged.plain)
                export.write(merged, Path(folder) / FOLDER, files_from=Path(self._cfg.model.path))
                return self._of_folder(str(Path(folder) / FOLDER), name)

    def _checkpoints(self) -> dict[int, Path]:
        """Step -> folder of the policy in its checkpoint, of the last attempt at that step."""
        run_dir = self._context.run_dir
        if run_dir is None:
            return {}
        newest: dict[int, tuple[int, Path]] = {}
        for folder in (run_dir / "checkpoints").glob("step-*"):
            order = order_of(folder.name)
            policy = _policy_folder(folder)
            if order is not None and policy is not None:
                step, attempt = order
                newest[step] = max(newest.get(step, (0, policy)), (attempt, policy))
        return {step: folder for step, (_, folder) in newest.items()}


def _policy_folder(checkpoint: Path) -> Path | None:
    """The folder of the policy in a checkpoint: the actor, or the only model that is exported."""
    exported = [folder.parent for folder in checkpoint.glob(f"*/{FOLDER}")]
    for folder in exported:
        if folder.name == _POLICY_ROLE:
            return folder
    return exported[0] if len(exported) == 1 else None


def _missing(step: int) -> CheckpointError:
    got = f"no checkpoint of step {step} with the policy's weights"
    do = "raise run.keep_checkpoints, or name another step"
    return CheckpointError.of(f"{STEP_PREFIX}{step}", got, "one in RUN_DIR/checkpoints", do)
