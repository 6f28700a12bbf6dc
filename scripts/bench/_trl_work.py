"""What both trainers of `bench.py trl` do: a model folder, a prompt file and sizes, by setting.

Lengths are fixed beforehand: the end of a sequence is a token that the model never says, so no
response ends early on either side, and nobody pays for suppressing it. `bench.py trl` checks it.
"""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 32_000
END = VOCABULARY - 1
LENGTHS = (8, 96)
"""Shortest and longest prompt of the second setting; drawn evenly."""
RARE_WORD = "<jupyter_script>"
"""A special token that SmolLM2 practically never draws."""


@dataclass(frozen=True)
class Work:
    """One step's work, the same for both."""

    name: str
    model: str
    """Folder with weights and tokenizer."""
    prompts: str
    """JSON Lines with a column prompt; steps take them in the order of the file."""
    threads: int
    """Of all processes of a trainer together."""
    steps: int
    num_prompts: int = 16
    num_samples: int = 8
    new_tokens: int = 64
    kl_coef: float = 0.04
    lr: float = 1e-5
    micro_rows: int = 16
    """Rows of a forward where a trainer is asked to cut its batch."""
    dtype: str = "float32"
    """Of the products; bfloat16: with float32 master weights."""
    device: str = "cpu"
    """Where both train and generate: cpu or cuda."""
    reward: str = "different_letters"
    """One of _trl/reward.py."""
    trained: str = ""
    """Folder for the model that TRL has trained; empty: it is not written."""

    @property
    def rows(self) -> int:
        """Samples of a step, which is one optimizer step."""
        return self.num_prompts * self.num_samples

    def prompt_tokens(self) -> list[list[int]]:
        """Lengths of the prompts of each step."""
        tokenizer = PreTrainedTokenizerFast.from_pretrained(self.model)
        texts = [json.loads(line)["prompt"] for line in Path(self.prompts).open()]
        texts = texts[: self.num_prompts * self.steps]
        lengths = [len(ids) for ids in tokenizer(texts).input_ids]
        starts = range(0, len(lengths), self.num_prompts)
        return [lengths[at : at + self.num_prompts] for at in starts]

    def tokens(self) -> float:
        """Tokens of a step: prompts (once for each sample) and responses; the mean over steps."""
        steps = self.prompt_tokens()
        prompts = sum(map(sum, steps)) / len(steps)
        return self.num_samples * (prompts + self.num_prompts * self.new_tokens)

    def write(self, path: Path) -> Path:
        """As JSON, for programs that cannot import this one."""
        path.write_text(json.dumps(asdict(self) | {"rows": self.rows}))
        return path


def stories(folder: Path, data: Path, *, threads: int, steps: int) -> Work:
    """A pre-trained story writer of 0.7 million parameters and openings of stories."""
    source = data / "models" / "stories260K-hd64"
    model = folder / "stories"
    shutil.copytree(source, model, copy_function=shutil.copy)
    _change(model / "tokenizer_config.json", eos_token="<unk>")  # in no text that it has learnt
    _set_end(model, 0)
    prompts = folder / "stories.jsonl"
    lines = (data / "tinystories" / "prompts.train.jsonl").read_text().splitlines()
    work = Work("stories", str(model), str(prompts), threads, steps)
    prompts.write_text("\n".join(lines[: work.num_prompts * steps]) + "\n")
    return work


def vocabulary(folder: Path, *, threads: int, steps: int) -> Work:
    """A random Llama of 11.3 million parameters, 32,000 words and prompts of 8 to 96 tokens."""
    model = folder / "vocabulary"
    prompts = folder / "vocabulary.jsonl"
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=END,
        pad_token_id=2,
    )
    torch.manual_seed(0)
    llama = LlamaForCausalLM(config)
    with torch.no_grad():  # one number of every hidden state is positive: it keeps the end away
        llama.model.embed_tokens.weight[:, 0] = 1.0
        llama.model.embed_tokens.weight[END, 0] = -10.0
    llama.save_pretrained(model)
    special = {0: "<unk>", 1: "<begin>", 2: "<pad>", END: "<end>"}
    words = {special.get(number, f"w{number}"): number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<begin>",
        pad_token="<pad>",
        eos_token="<end>",
        padding_side="left",
    ).save_pretrained(model)
    _set_end(model, END)
    work = Work("vocabulary", str(model), str(prompts), threads, steps, 8, 4)
    rng = random.Random(0)
    with prompts.open("w") as file:
        for _ in range(work.num_prompts * steps):
            text = " ".join(f"w{rng.randrange(3, END)}" for _ in range(rng.randint(*LENGTHS)))
            file.write(json.dumps({"prompt": text}) + "\n")
    return work


def smollm2(
    folder: Path, data: Path, source: Path, *, threads: int, steps: int, dtype: str
) -> Work:
    """SmolLM2-135M-Instruct (scripts/make_smollm2.py) and questions of GSM8K as plain text."""
    model = folder / "smollm2"
    shutil.copytree(source, model, copy_function=shutil.copy)
    _change(model / "tokenizer_config.json", eos_token=RARE_WORD)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(source)
    _set_end(model, tokenizer.convert_tokens_to_ids(RARE_WORD))
    prompts = folder / "smollm2.jsonl"
    work = Work(
        "smollm2", str(model), str(prompts), threads, steps, 8, 4, micro_rows=8, dtype=dtype
    )
    with prompts.open("w") as file:
        for line in (data / "gsm8k" / "train.jsonl").read_text().splitlines():
            question = json.loads(line)["question"]
            file.write(json.dumps({"prompt": question}) + "\n")
    return work


def _set_end(model: Path, token: int) -> None:
    _change(model / "config.json", eos_token_id=token)
    _change(model / "generation_config.json", eos_token_id=token, pad_token_id=2)


def _change(file: Path, **values: object) -> None:
    found = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(found | values))
