"""Make the bundled arithmetic task: data split, tokenizer and a tiny pre-trained model.

    python scripts/make_arithmetic.py --out algos/arithmetic

The task is two-digit addition, character by character: "47+38=" -> "85". All 8100 problems with
both terms in 10..99 are shuffled by --seed and cut into three disjoint sets:

    eval.jsonl    held out: in neither pre-training nor RL prompts
    train.jsonl   RL prompts; the answer column is read by the reward function only
    pretrain      supervised next-token targets of this script; written nowhere

The model is a Llama with head_dim 32, trained from scratch on one thread. Training stops as soon
as greedy exact-match accuracy on a probe of the RL prompts is inside the wanted band, so the
start leaves PPO something to learn; held-out accuracy is only measured, never used to stop.
Same seed, torch build and thread count: same files, byte for byte. Takes about a minute.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<bos>", "<eos>"]
CHARACTERS = "0123456789+-*=?"
PROMPT_TOKENS = 7  # <bos> and six characters: every prompt is equally long
ANSWER_TOKENS = 4  # three digits at most, then <eos>
IGNORED = -100  # label that cross_entropy skips


@dataclass(frozen=True)
class Problem:
    """One sum: the prompt and its exact answer."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Split3:
    """Three disjoint lists of problems."""

    evaluation: list[Problem]
    pretrain: list[Problem]
    reinforce: list[Problem]


def split_problems(seed: int, num_eval: int, num_pretrain: int) -> Split3:
    """All two-digit sums, shuffled by seed, cut into held-out, pre-training and RL prompts."""
    problems = [Problem(f"{a}+{b}=", str(a + b)) for a in range(10, 100) for b in range(10, 100)]
    random.Random(seed).shuffle(problems)
    cut = num_eval + num_pretrain
    return Split3(problems[:num_eval], problems[num_eval:cut], problems[cut:])


def without_carry(problem: Problem) -> Problem:
    """The same sum as a pupil answers it who forgets to carry the ten of the units."""
    a, b = (int(term) for term in problem.prompt.rstrip("=").split("+"))
    carry = a % 10 + b % 10 >= 10
    return Problem(problem.prompt, str(a + b - 10 * carry))


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, <bos> before every text; an unknown character becomes "?"."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = Split(Regex("[\\s\\S]"), behavior="isolated")
    tokenizer.decoder = Fuse()
    tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="?",
        clean_up_tokenization_spaces=False,
        model_max_length=64,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace) -> LlamaForCausalLM:
    """A Llama of args.layers layers, args.width wide, head_dim 32, fp32, from random weights."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.width,
        intermediate_size=2 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.width // 32,
        num_key_value_heads=args.width // 32,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def encode(
    problems: Sequence[Problem], tokenizer: PreTrainedTokenizerFast
) -> tuple[torch.Tensor, torch.Tensor]:
    """Joined token ids (N, 11) and labels (N, 11): only answer and <eos> are learned."""
    ids = torch.full((len(problems), PROMPT_TOKENS + ANSWER_TOKENS), tokenizer.pad_token_id)
    for row, problem in enumerate(problems):
        tokens = tokenizer(problem.prompt + problem.answer).input_ids + [tokenizer.eos_token_id]
        ids[row, : len(tokens)] = torch.tensor(tokens)
    labels = ids.masked_fill(ids == tokenizer.pad_token_id, IGNORED)
    labels[:, :PROMPT_TOKENS] = IGNORED
    return ids, labels


@torch.no_grad()
def greedy_accuracy(
    model: LlamaForCausalLM, problems: Sequence[Problem], tokenizer: PreTrainedTokenizerFast
) -> float:
    """Share of problems whose greedy answer, <eos> included, is exactly right.

    Teacher forcing gives the same verdict as decoding: an answer is right if and only if each of
    its tokens is the likeliest one after the right tokens before it.
    """
    ids, labels = encode(problems, tokenizer)
    best = model(input_ids=ids).logits[:, :-1].argmax(-1)  # (N, 10)
    wanted = labels[:, 1:]
    return ((best == wanted) | (wanted == IGNORED)).all(-1).float().mean().item()


def batches(num_rows: int, batch_size: int, seed: int) -> Iterator[torch.Tensor]:
    """Row numbers (batch_size,), epoch after epoch, without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(num_rows, generator=generator)
        yield from order[: num_rows - num_rows % batch_size].split(batch_size)


def pretrain(
    model: LlamaForCausalLM,
    split: Split3,
    tokenizer: PreTrainedTokenizerFast,
    args: argparse.Namespace,
) -> int:
    """Train on split.pretrain until the probe accuracy reaches args.target; steps taken."""
    right = encode(split.pretrain, tokenizer)
    wrong = encode([without_carry(p) for p in split.pretrain], tokenizer)
    coin = torch.Generator().manual_seed(args.seed)
    probe = split.reinforce[:1000]
    easy = [p for p in probe if p == without_carry(p)]
    sloppy = [without_carry(p) for p in probe]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=args.weight_decay
    )
    start = time.perf_counter()
    for step, rows in enumerate(batches(len(right[0]), args.batch_size, args.seed), start=1):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, step / 50)
        forgets = torch.rand(len(rows), 1, generator=coin) < args.forget
        ids, labels = (torch.where(forgets, w[rows], r[rows]) for r, w in zip(right, wrong))
        logits = model(input_ids=ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % args.probe_every == 0 or step == args.max_steps:
            accuracy = greedy_accuracy(model, probe, tokenizer)
            acc2 = greedy_accuracy(model, sloppy, tokenizer)
            acc3 = greedy_accuracy(model, easy, tokenizer)
            seconds = time.perf_counter() - start
            print(f"step {step}: loss {loss.item():.4f}, probe {accuracy:.3f}, {acc2:.3f} {acc3:.3f} {seconds:.0f} s")
            if acc3 >= args.target or step == args.max_steps:
                return step
    raise AssertionError("batches never ends")


def write_problems(path: Path, problems: Sequence[Problem]) -> None:
    """One JSON object per line: prompt and answer."""
    rows = [json.dumps({"prompt": p.prompt, "answer": p.answer}) for p in problems]
    path.write_text("\n".join(rows) + "\n", encoding="ascii")


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("algos/arithmetic"), help="folder")
    parser.add_argument("--seed", type=int, default=0, help="split, weights and batch order")
    parser.add_argument("--num-eval", type=int, default=1000, help="held-out problems")
    parser.add_argument("--num-pretrain", type=int, default=3000, help="supervised problems")
    parser.add_argument("--forget", type=float, default=0.65, help="share of carries forgotten")
    parser.add_argument("--layers", type=int, default=2, help="decoder layers")
    parser.add_argument("--width", type=int, default=128, help="hidden size, a multiple of 32")
    parser.add_argument("--lr", type=float, default=1e-3, help="AdamW learning rate")
    parser.add_argument("--weight-decay", type=float, default=0.1, help="AdamW weight decay")
    parser.add_argument("--batch-size", type=int, default=128, help="problems per step")
    parser.add_argument("--target", type=float, default=0.98, help="probe accuracy to stop at")
    parser.add_argument("--probe-every", type=int, default=50, help="steps between probes")
    parser.add_argument("--max-steps", type=int, default=6000, help="stop here at the latest")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    return parser.parse_args()


def main() -> None:
    """Split, build, train, write, report."""
    args = parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    split = split_problems(args.seed, args.num_eval, args.num_pretrain)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, args)
    num_steps = pretrain(model, split, tokenizer, args)
    accuracy = greedy_accuracy(model, split.evaluation, tokenizer)
    args.out.mkdir(parents=True, exist_ok=True)
    write_problems(args.out / "eval.jsonl", split.evaluation)
    write_problems(args.out / "train.jsonl", split.reinforce)
    model.save_pretrained(args.out / "model")
    tokenizer.save_pretrained(args.out / "model")
    num_parameters = sum(p.numel() for p in model.parameters())
    print(f"{num_parameters} parameters, {num_steps} steps of {args.batch_size}")
    print(f"held-out greedy accuracy {accuracy:.4f} on {len(split.evaluation)} problems")


if __name__ == "__main__":
    main()
