"""TRL's side of `bench.py trl`; runs in TRL's own environment: WORK.json SETTING OUT.json.

SETTING: whole (the batch in one forward), micro (rows cut, gradients accumulated), ranks (two
processes of DistributedDataParallel, started by torchrun), vllm and vllm-micro (the first two with
vLLM in the same process, on a GPU). The file steps beside OUT gets a line at
the end of each step; OUT: what TRL says of tokens and rewards. The trained model is written to the
folder that WORK names as "trained", if it does.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from reward import REWARDS
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

MAX_PROMPT_TOKENS = 256
"""As in bench/trl.py."""


class Clock(TrainerCallback):
    """Says that a step has ended: one line for each, on the first process."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """One more."""
        if int(os.environ.get("RANK", 0)) == 0:
            with self._path.open("a") as file:
                file.write("step\n")


def reward_function(name: str) -> Any:
    """One of `reward`, as TRL calls it: columns of the data set come as lists."""
    function = REWARDS[name]

    def rewards(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
        scores = []
        for number, (prompt, completion) in enumerate(zip(prompts, completions)):
            text = completion
            if not isinstance(completion, str):  # of a conversation: one message
                text = completion[0]["content"]
            row = {"answer": columns["answer"][number]} if "answer" in columns else {}
            scores.append(function(str(prompt), text, row))
        return scores

    return rewards


def settings(work: dict[str, Any], setting: str) -> dict[str, Any]:
    """How the batch is cut."""
    processes = int(os.environ.get("WORLD_SIZE", 1))
    own = work["rows"] // processes
    rows = work["micro_rows"] if setting.endswith("micro") else own
    found = {
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": own // rows,
        "steps_per_generation": own // rows,
    }
    if setting.startswith("vllm"):
        longest = MAX_PROMPT_TOKENS + work["new_tokens"]
        found |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": longest}
    return found


def main(work_file: str, setting: str, out: str) -> None:
    """Train; the first process writes the answer."""
    work = json.loads(Path(work_file).read_text())
    torch.set_num_threads(work["threads"] // int(os.environ.get("WORLD_SIZE", 1)))
    config = GRPOConfig(
        output_dir=f"{out}.runs",
        max_steps=work["steps"],
        learning_rate=work["lr"],
        lr_scheduler_type="constant",
        num_generations=work["num_samples"],
        max_completion_length=work["new_tokens"],
        beta=work["kl_coef"],
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        loss_type="grpo",
        num_iterations=1,
        shuffle_dataset=False,
        bf16=work["dtype"] == "bfloat16",
        fp16=False,
        use_cpu=work["device"] == "cpu",
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
        **settings(work, setting),
    )
    tokenizer = AutoTokenizer.from_pretrained(work["model"], padding_side="left")
    clock = Clock(Path(out).with_name("steps"))
    lines = Path(work["prompts"]).read_text().splitlines()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32),
        reward_funcs=reward_function(work["reward"]),
        args=config,
        train_dataset=Dataset.from_list([json.loads(line) for line in lines]),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.train()
    if int(os.environ.get("RANK", 0)) == 0:
        logs = [x for x in trainer.state.log_history if "reward" in x]
        found = {"logs": logs, "versions": _versions()}
        Path(out).write_text(json.dumps(found))
        if work["trained"]:
            trainer.save_model(work["trained"])
            tokenizer.save_pretrained(work["trained"])


def _versions() -> dict[str, str]:
    import transformers
    import trl

    return {"trl": trl.__version__, "transformers": transformers.__version__}


if __name__ == "__main__":
    main(*sys.argv[1:])
