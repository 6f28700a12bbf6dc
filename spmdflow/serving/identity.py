"""Hashes by which a run knows whether a server has its model and tokenizer. Reads files only."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path

from spmdflow.weights.architecture import read_config

_IGNORED = frozenset(
    {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "auto_map"}
)
"""Entries of config.json that do not change the model's tensors or tokens."""
_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model")
_DIGEST_BYTES = 16


@lru_cache(maxsize=8)
def config_hash(path: str) -> str:
    """Hash of what config.json of a model folder says about tensors and forward pass."""
    facts = {name: value for name, value in read_config(path).items() if name not in _IGNORED}
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()


@lru_cache(maxsize=8)
def tokenizer_hash(path: str) -> str:
    """Hash of the files of a folder that define its tokens; "" for a folder without any."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    count = 0
    for name in _TOKENIZER_FILES:
        file = Path(path) / name
        if file.is_file():
            digest.update(name.encode())
            digest.update(file.read_bytes())
            count += 1
    return digest.hexdigest() if count else ""
