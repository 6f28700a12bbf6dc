"""Facts about a model from its folder, and which folder of a checkpoint holds a model.

Reads JSON only, and asks transformers only about a folder with custom code.
A size that a file does not state is 0 and is not checked.

    RUN_DIR, RUN_DIR/checkpoints, RUN_DIR/checkpoints/latest      the newest sealed step
    RUN_DIR/checkpoints/step-N                                    that step
        -> RUN_DIR/checkpoints/step-N/<role>/hugging_face
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from spmdflow.config.objective import UpdateConfig
from spmdflow.errors import ConfigError
from spmdflow.kind.generator import generator_kind, generator_names, generators_with_experts
from spmdflow.weights.architecture import Architecture, read_config, read_json
from spmdflow.weights.index import read_index
from spmdflow.weights.own_code import refuse_own_code
from spmdflow.weights.peft_settings import PEFT_CONFIG, is_peft_folder

CAUSAL_LM = ("ForCausalLM", "LMHeadModel")
"""Endings of architectures that generate."""
SCORER = ("ForSequenceClassification",)
"""Endings of architectures that score a sequence."""


@dataclass(frozen=True)
class ModelFacts:
    """One model folder; `key` is the setting that names it, for messages."""

    key: str
    path: Path
    config: Mapping[str, Any]
    """The content of config.json."""
    arch: Architecture
    """Its sizes."""


def read_model_folder(key: str, path: str, *, weights: bool = True) -> ModelFacts:
    """Return the facts of the Hugging Face folder `path`; ConfigError if it cannot be used.

    It must have a config.json that transformers can load without the folder's own code and, with
    `weights`, *.safetensors (or a .metadata file) and a valid index. Entries of text_config
    override those of config.json around it.
    key: the setting, for messages.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(
            f"{key}: no folder {path} in {Path.cwd()}, expected a Hugging Face folder; "
            f"download the model and give its folder"
        )
    if is_peft_folder(folder):
        do = f"set {_adapter_setting(key)}={path}, and {key} to the model that it was trained on"
        raise ConfigError.of(key, f"{path} with an adapter alone", "a whole model", do)
    config = read_config(folder, key=key)
    refuse_own_code(key, folder)
    if weights and not any(folder.glob("*.safetensors")) and not (folder / ".metadata").is_file():
        raise ConfigError(
            f"{key}: no *.safetensors in {path}, expected weights next to config.json; "
            f"save the model with safetensors"
        )
    if weights:
        read_index(folder, key=key)
    arch = Architecture.sizes_from_config(config)
    return ModelFacts(key, folder, {**config, **config.get("text_config", {})}, arch)


def read_vocabulary(key: str, folder: Path) -> dict[str, int] | None:
    """Return token -> id of a folder's tokenizer.json, added tokens included.

    None if there is no such file, or its vocabulary is empty or has an unknown form. A list of
    (token, score), as of unigram tokenizers, has the ids in its order.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    tokenizer = read_json(file, key=key)
    tokens = tokenizer.get("model", {}).get("vocab")
    if isinstance(tokens, list):  # unigram: [[token, score], ...] in the order of ids
        tokens = {token: number for number, (token, _) in enumerate(tokens)}
    if not isinstance(tokens, dict) or not tokens:
        return None
    added = {}
    for token in tokenizer.get("added_tokens", ()):
        added[token["content"]] = token["id"]
    return {**tokens, **added}


def own_vocabulary(key: str, folder: Path, tokenizer: Path) -> dict[str, int] | None:
    """Return token -> id of a model folder's own tokenizer if it differs from `tokenizer`.

    None if both tokenizer.json have the same bytes or ids, or if one is missing or unreadable.
    tokenizer: the folder of the run's tokenizer.
    """
    ours = tokenizer / "tokenizer.json"
    theirs = folder / "tokenizer.json"
    if not ours.is_file() or not theirs.is_file() or theirs.read_bytes() == ours.read_bytes():
        return None
    vocabulary = read_vocabulary(key, tokenizer)
    other = read_vocabulary(key, folder)
    if vocabulary is None or other == vocabulary:
        return None
    return other


def check_kind(facts: ModelFacts, endings: tuple[str, ...]) -> None:
    """Raise ConfigError unless an architecture in config.json ends in one of `endings`.

    A sequence classifier must have one label (its score). A config without architectures passes.
    """
    names = tuple(facts.config.get("architectures") or ())  # of its classes in transformers
    if names and not any(name.endswith(endings) for name in names):
        expected = f"an architecture whose name ends in {' or '.join(endings)}"
        do = f"give the folder of such a model instead of {facts.path}"
        raise ConfigError.of(facts.key, ", ".join(names), expected, do)
    labels = facts.config.get("num_labels") or len(facts.config.get("id2label", "01"))
    if names and names[0].endswith(SCORER) and labels != 1:
        expected = "1, as its logit is the score"
        do = f"give the folder of a model with num_labels 1 instead of {facts.path}"
        raise ConfigError.of(facts.key, f"{labels} labels", expected, do)


def check_heads(facts: ModelFacts, *, generator: str | None) -> None:
    """Raise ConfigError if heads do not fit the hidden size, each other or the generator.

    Without a head_dim in config.json the heads divide hidden_size; key-value heads divide the
    heads; head_dim is at least what the generator's kernels need. Nothing is checked if the number
    of heads or hidden_size is 0, which means unknown.
    generator: None if the model does not generate.
    """
    arch = facts.arch
    hidden = arch.hidden_size
    heads = arch.num_heads
    kv_heads = arch.num_kv_heads
    if not hidden or not heads:
        return
    file = facts.path / "config.json"
    if facts.config.get("head_dim") is None and hidden % heads:
        got = f"{heads} attention heads for hidden_size {hidden}"
        expected = "a number of heads that divides hidden_size, or a head_dim"
        raise ConfigError.of(facts.key, got, expected, f"correct {file}")
    if heads % kv_heads:
        got = f"{kv_heads} key-value heads for {heads} attention heads"
        expected = "a number of key-value heads that divides the attention heads"
        raise ConfigError.of(facts.key, got, expected, f"correct {file}")
    head_dim = arch.head_dim
    if generator:
        least = generator_kind(generator, key="actor.rollout.engine").least_head_dim
    else:
        least = 1
    if head_dim < least:
        got = f"head_dim {head_dim}"
        do = f"set actor.rollout.engine={generator_names()[0]} or use another model"
        raise ConfigError.of(facts.key, got, f"at least {least} for {generator}", do)


def check_family(facts: ModelFacts, *, generator: str) -> None:
    """Raise ConfigError if the generator is known to be wrong for the model's family."""
    family = facts.config.get("model_type", "")
    reason = generator_kind(generator, key="actor.rollout.engine").refused_families.get(family)
    if reason:
        got = f"a model of the family {family} for {generator} ({reason})"
        expected = "a family for which the generator is right"
        do = f"set actor.rollout.engine={generator_names()[0]}"
        raise ConfigError.of(facts.key, got, expected, do)


def check_experts(
    facts: ModelFacts, key: str, update: UpdateConfig, *, generator: str | None
) -> None:
    """Raise ConfigError for settings of experts that the model or its generator does not have.

    key: the setting of `update`. generator: None if the model does not generate, or if its
    generator is not chosen yet.
    """
    replays = getattr(update, "router", "own") == "replay"
    dense = f"for {facts.path}, which has no experts"
    if not facts.arch.num_experts and update.router_balance_coef > 0:
        where = f"{key}.router_balance_coef"
        got = f"{update.router_balance_coef:g} {dense}"
        raise ConfigError.of(where, got, "a mixture of experts", f"set {where}=0")
    if not replays:
        return
    where = f"{key}.router"
    if not facts.arch.num_experts:
        do = f"set {where}=own"
        raise ConfigError.of(where, f"replay {dense}", "a mixture of experts", do)
    if generator is not None and not generator_kind(generator).returns_experts:
        got = f"replay with {generator}, which does not return the experts of its tokens"
        able = " or ".join(generators_with_experts())
        do = f"set actor.rollout.engine={able}, or {where}=own"
        raise ConfigError.of(where, got, "a generator that returns them", do)


def check_weights_setting(facts: ModelFacts, *, weights: str) -> None:
    """Raise ConfigError for a rollout.weights that shares storage, with a model that cannot."""
    if weights in ("blocks", "flat") and not facts.arch.is_dense_with_table:
        got = f"{weights} for {facts.path}, whose weights a generator stores in another form"
        expected = "copy, or auto, which then chooses copy"
        raise ConfigError.of("actor.rollout.weights", got, expected, "set it to auto")


def check_positions(facts: ModelFacts, prompt_tokens: int, response_tokens: int) -> None:
    """Raise ConfigError if prompt and response tokens together exceed the model's context.

    A model that states no context length (0) passes.
    """
    needed = prompt_tokens + response_tokens
    positions = facts.arch.max_positions
    if positions and needed > positions:
        raise ConfigError(
            f"{facts.key}: got max_prompt_tokens {prompt_tokens} + max_new_tokens "
            f"{response_tokens} = {needed}, expected at most the model's {positions} "
            f"positions; lower data.max_prompt_tokens or actor.rollout.max_new_tokens"
        )


def check_vocabulary(facts: ModelFacts, tokenizer: Path, vocabulary: dict[str, int]) -> None:
    """Raise ConfigError if the model has too few embeddings or other ids than the tokenizer.

    tokenizer: the folder of the run's tokenizer; vocabulary: its token -> id. The model's own
    tokenizer.json, if it has one, must give the same ids. An unknown vocab_size (0) is not checked.
    """
    last = max(vocabulary.values())
    words = facts.arch.vocab_size
    if words and last >= words:
        expected = f"at least {last + 1}, the ids of the tokenizer {tokenizer}"
        do = "give a model with that tokenizer"
        raise ConfigError.of(facts.key, f"a vocabulary of {words}", expected, do)
    other = own_vocabulary(facts.key, facts.path, tokenizer)
    if other is None:
        return
    token = min(dict(other.items() ^ vocabulary.items()))
    got = f"another tokenizer ({token!r} is {other.get(token)}, in {tokenizer} "
    got += f"{vocabulary.get(token)})"
    expected = "the same ids, as every model reads the actor's tokens"
    raise ConfigError.of(facts.key, got, expected, "give a model with that tokenizer")


def _adapter_setting(key: str) -> str:
    """The setting that takes an adapter, for an error about a model's path."""
    section = key.rpartition(".")[0]
    if not section.endswith("model"):
        section = "actor.model"
    return f"{section}.lora.adapter"


_MANIFEST = "manifest.json"
_EXPORT = "hugging_face"
_LATEST = "latest"
_STEP = re.compile(r"step-\d+(\.\d+)?")


Form = Literal["model", "adapter"]
"""What a setting names: a whole model, or an adapter in peft's format."""


def exported_folder(key: str, path: str, *, form: Form = "model") -> str:
    """Return the Hugging Face folder in a checkpoint or RUN_DIR; any other path unchanged.

    A RUN_DIR means its newest step. Of several models the one of the setting's role is chosen, then
    the actor's, then the only one. ConfigError if the checkpoint has no such model, if that has the
    other form, or if a file of the model does not have the size in the manifest.
    key: the setting, such as "actor.model.path", whose first word is the role.
    """
    step = _step_folder(key, Path(path))
    if step is None:
        return path
    sizes = _sizes(key, step)
    roles = sorted({name.split("/")[0] for name in sizes if f"/{_EXPORT}/" in name})
    wanted = [role for role in (key.split(".")[0], "actor") if role in roles]
    if not wanted and len(roles) != 1:
        raise ConfigError(
            f"{key}: got {step} with {'models of ' + ', '.join(roles) if roles else 'no model'}, "
            f"expected one model as a Hugging Face folder; name its folder, such as "
            f"{step / (roles[0] if roles else 'actor') / _EXPORT}"
        )
    role = wanted[0] if wanted else roles[0]
    has_adapters = f"{role}/{_EXPORT}/{PEFT_CONFIG}" in sizes
    if has_adapters and form == "model":
        do = f"python -m spmdflow.export {step} --to FOLDER merges them: give that folder, or give "
        do += f"the model that was trained, and {_adapter_setting(key)}={step}"
        raise ConfigError.of(key, f"{step} with adapters alone", "a whole model", do)
    if form == "adapter" and not has_adapters:
        do = f"give it as {key.removesuffix('.lora.adapter')}.path"
        raise ConfigError.of(key, f"{step} with a whole model", "a run that trains adapters", do)
    for name in [name for name in sizes if name.startswith(f"{role}/{_EXPORT}/")]:
        file = step / name
        size = sizes[name]
        got = file.stat().st_size if file.is_file() else None
        if got != size:
            what = "which is missing" if got is None else f"which has {got} bytes"
            expected = f"{size} bytes, which were recorded when the checkpoint was completed"
            do = "restore the file from a backup, or choose another step"
            raise ConfigError.of(key, f"{file}, {what}", expected, do)
    return str(step / role / _EXPORT)


def names_newest_step(path: str) -> bool:
    """Whether a path means the newest checkpoint of a run, whichever that is; not one of them."""
    return not _STEP.fullmatch(Path(path).name)


def _step_folder(key: str, path: Path) -> Path | None:
    """Return the checkpoint step that a path means; None if the path is of no checkpoint.

    It is the path itself if it is named step-N and has no config.json. Otherwise the file `latest`,
    in the folder or in its checkpoints/, names the step; the path may also be that file.
    ConfigError if that step does not exist, or for a RUN_DIR without a step.
    """
    if _STEP.fullmatch(path.name) and not (path / "config.json").exists():
        return path
    files = (path, path / _LATEST, path / "checkpoints" / _LATEST)
    latest = next((p for p in files if p.name == _LATEST and p.is_file()), None)
    if latest is None:
        _refuse_unsaved_run(key, path)
        return None
    name = latest.read_text(encoding="utf-8", errors="replace").strip()
    if not _STEP.fullmatch(name) or not (latest.parent / name).is_dir():
        raise ConfigError(
            f"{key}: got {latest}, which names {name!r}, expected a checkpoint in the same folder; "
            f"write the name of one of {_steps(latest.parent)} into it, or give the step's folder"
        )
    return latest.parent / name


def _refuse_unsaved_run(key: str, path: Path) -> None:
    """Raise ConfigError if a path is the RUN_DIR of a run that has saved nothing."""
    is_run_dir = (path / "metrics.jsonl").is_file() and not (path / "config.json").exists()
    if is_run_dir:
        raise ConfigError(
            f"{key}: the run in {path} has saved no step, expected a checkpoint; start the run "
            f"again (it saves its last step), or give another model"
        )


def _sizes(key: str, step: Path) -> dict[str, int]:
    """Return file name -> bytes of a complete checkpoint step, from its manifest.json.

    ConfigError if there is no manifest or it cannot be read; the message lists the steps that have
    one.
    """
    manifest = step / _MANIFEST
    if not manifest.is_file():
        if not step.is_dir():
            got = "no such folder"
        else:
            got = f"a folder without {_MANIFEST}"
        do = f"choose one of {_steps(step.parent)}"
        raise ConfigError.of(key, f"{step}, {got}", "a sealed checkpoint", do)
    try:
        files = json.loads(manifest.read_bytes())["files"]
        sizes = {}
        for name, facts in files.items():
            sizes[str(name)] = int(facts["num_bytes"])
        return sizes
    except (ValueError, LookupError, TypeError, AttributeError) as err:
        raise ConfigError(
            f"{key}: got {manifest}, which does not read as a manifest ({type(err).__name__}), "
            f"expected the file as it was sealed; restore it, or choose another of "
            f"{_steps(step.parent)}"
        ) from err


def _steps(folder: Path) -> str:
    """Names of the sealed checkpoints of a folder."""
    steps = sorted(path.parent.name for path in folder.glob(f"step-*/{_MANIFEST}"))
    return ", ".join(steps) or f"none, as {folder} has no sealed checkpoint"
