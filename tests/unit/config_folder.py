"""A folder with everything a valid PPO configuration names: script, YAML, model, prompts, reward.

Models are config.json, tokenizer.json and an empty weights file: nothing here loads them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spmdflow.config.check import check
from spmdflow.config.load import load

SCRIPT = '"""A script."""\n\n\ndef main(flow, cfg):\n    pass\n'
REWARD = """\
def score(prompt, response, row):
    return 1.0


def short(prompt, response):
    return 1.0
"""
YAML = """\
data: {train_path: train.jsonl, eval_path: eval.jsonl, max_prompt_tokens: 16}
actor: {model: {path: actor}, rollout: {max_new_tokens: 8}}
reward: {function: "reward.py:score"}
"""
ACTOR = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "vocab_size": 8,
}
SCORER = {
    **ACTOR,
    "architectures": ["LlamaForSequenceClassification"],
    "id2label": {"0": "LABEL_0"},
}
TOKENS = {"<pad>": 0, "<bos>": 1, "a": 2, "b": 3}


def write_config_folder(folder: Path) -> Path:
    """Fill `folder` with ppo.py, ppo.yaml, actor/, scorer/, train.jsonl, eval.jsonl, reward.py."""
    (folder / "ppo.py").write_text(SCRIPT)
    (folder / "ppo.yaml").write_text(YAML)
    (folder / "reward.py").write_text(REWARD)
    for name in ("train.jsonl", "eval.jsonl"):
        (folder / name).write_text('{"prompt": "ab"}\n')
    write_model(folder / "actor", ACTOR)
    write_model(folder / "scorer", SCORER)
    return folder


def write_model(folder: Path, config: dict[str, Any], tokens: dict[str, int] = TOKENS) -> None:
    """A model folder that a check accepts."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}}))
    (folder / "model.safetensors").write_bytes(b"")


def accept(*overrides: str, world_size: int = 4) -> Any:
    """Load ./ppo.py with the overrides and check it; the settings."""
    cfg = load("ppo.py", None, overrides).cfg
    check(cfg, world_size)
    return cfg
