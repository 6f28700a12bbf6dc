"""Make the bundled arithmetic task: data split, tokenizer and a tiny pre-trained model.

    python scripts/make_arithmetic.py --out algos/arithmetic
    python scripts/make_arithmetic.py --out runs/arithmetic_mixture --experts 8

The task is two-digit addition, character by character: "47+38=" -> "85". All 4095 unordered pairs
of terms in 10..99 are shuffled by --seed and cut into three disjoint sets; a pair brings both of
its orders, so no set holds the mirror image of another set's sum:

    eval.jsonl      held out: in neither pre-training nor RL prompts
    train.jsonl     RL prompts; their answers are read by the reward function only
    pretrain.jsonl  of the sums whose answers this script teaches, those without a carry, as text:
                    what the model has read and need not unlearn (PPO-ptx)

The model is a Llama with head_dim 32, trained from scratch on the next token of the answer. Its
teacher forgets most carries: a fresh coin per presentation (--forget) decides whether a sum whose
units reach ten is answered right (85) or without the carry (75). The model so starts with two
habits, the wrong one the likelier. It answers nearly all sums without a carry and few of the
others, about 55 % greedy; which habit is right only a reward can tell, on sums it never saw.

With --experts the model is a Qwen3-MoE, whose tokens get two experts each. Its auxiliary loss keeps
them even.

The command fails, and writes nothing, when the start is outside --band. Same seed, torch build,
machine type and --threads: same files. About two minutes on one thread.
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
from tokenizers.pre_tokenizers import Split as SplitPattern
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

VOCABULARY = ["<pad>", "<bos>", "<eos>", *"0123456789+=", "?"]  # "?": any other character
PROMPT_TOKENS = 7  # <bos> and six characters: every prompt is equally long
ANSWER_TOKENS = 4  # three digits at most, then <eos>
IGNORED = -100  # label that cross_entropy skips
WARMUP_STEPS = 50
BALANCE = 0.1  # weight of the auxiliary loss of a mixture of experts
MAX_BYTES = 3_000_000  # of the folder of a dense model


@dataclass(frozen=True)
class Problem:
    """One sum: the prompt and the text that is taken for its answer."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Split:
    """Three disjoint lists of problems with exact answers."""

    held_out: list[Problem]
    pretrain: list[Problem]
    reinforce: list[Problem]


def split_problems(seed: int, num_eval_pairs: int, num_pretrain_pairs: int) -> Split:
    """All two-digit sums cut into three by unordered pairs, each pair in both orders."""
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    random.Random(seed).shuffle(pairs)
    cut = num_eval_pairs + num_pretrain_pairs
    return Split(
        both_orders(pairs[:num_eval_pairs]),
        both_orders(pairs[num_eval_pairs:cut]),
        both_orders(pairs[cut:]),
    )


def both_orders(pairs: Sequence[tuple[int, int]]) -> list[Problem]:
    """a+b and b+a of every pair, once where a equals b; neighbours in the list."""
    terms = [term for a, b in pairs for term in dict.fromkeys([(a, b), (b, a)])]
    return [Problem(f"{a}+{b}=", str(a + b)) for a, b in terms]


def without_carry(problem: Problem) -> Problem:
    """The same sum as answered by someone who forgets to carry the ten of the units."""
    a, b = (int(term) for term in problem.prompt.rstrip("=").split("+"))
    carry = a % 10 + b % 10 >= 10
    return Problem(problem.prompt, str(a + b - 10 * carry))


def no_carry(problems: Sequence[Problem]) -> list[Problem]:
    """The sums whose answer is the same with and without the habit of forgetting."""
    return [problem for problem in problems if problem == without_carry(problem)]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, <bos> before every text."""
    ids = {token: i for i, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(ids, unk_token="?"))
    tokenizer.pre_tokenizer = SplitPattern(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = Fuse()
    tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", ids["<bos>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
        model_max_length=64,
    )


def build_model(
    tokenizer: PreTrainedTokenizerFast, *, num_layers: int, width: int, num_experts: int
) -> PreTrainedModel:
    """A Llama, or a mixture of experts, with head_dim 32 and untied embeddings, float32, random."""
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "num_hidden_layers": num_layers,
        "num_attention_heads": width // 32,
        "num_key_value_heads": width // 32,
        "head_dim": 32,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    if not num_experts:
        return LlamaForCausalLM(LlamaConfig(intermediate_size=2 * width, **sizes))
    experts = {
        "num_experts": num_experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": width,
        "norm_topk_prob": True,
        "router_aux_loss_coef": BALANCE,
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**experts, **sizes))


def encode(problems: Sequence[Problem], tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """Prompt, answer and <eos> of each problem, right-padded: (N, 11)."""
    ids = torch.full((len(problems), PROMPT_TOKENS + ANSWER_TOKENS), tokenizer.pad_token_id)
    for row, problem in enumerate(problems):
        tokens = tokenizer(problem.prompt + problem.answer).input_ids + [tokenizer.eos_token_id]
        ids[row, : len(tokens)] = torch.tensor(tokens)
    return ids


def answer_labels(ids: Tensor, pad_token_id: int) -> Tensor:
    """What the logits of ids[:, :-1] shall predict, prompt and padding ignored: (N, 10)."""
    labels = ids.masked_fill(ids == pad_token_id, IGNORED)
    labels[:, :PROMPT_TOKENS] = IGNORED
    return labels[:, 1:]


@torch.no_grad()
def greedy_accuracy(
    model: PreTrainedModel, problems: Sequence[Problem], tokenizer: PreTrainedTokenizerFast
) -> float:
    """Share of problems whose greedy response is the answer, then <eos>.

    Teacher forcing gives the verdict of decoding: a response is the answer if and only if each
    token of the answer is the likeliest one after the answer's tokens before it.
    """
    ids = encode(problems, tokenizer)
    labels = answer_labels(ids, tokenizer.pad_token_id)
    likeliest = model(input_ids=ids).logits[:, :-1].argmax(-1)  # (N, 10)
    return ((likeliest == labels) | (labels == IGNORED)).all(-1).float().mean().item()


def batches(num_rows: int, batch_size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Row numbers (batch_size,), epoch after epoch without end; an epoch's odd rest is left."""
    while True:
        order = torch.randperm(num_rows, generator=generator)
        yield from order[: num_rows - num_rows % batch_size].split(batch_size)


def pretrain(
    model: PreTrainedModel,
    split: Split,
    tokenizer: PreTrainedTokenizerFast,
    args: argparse.Namespace,
) -> PreTrainedModel:
    """args.num_steps steps of next-token cross-entropy on answers, most carries forgotten.

    The learning rate stays at its peak and the running mean of the weights is returned: such a
    model bears the noise of RL's first updates; one annealed to zero was seen to break.
    """
    right = encode(split.pretrain, tokenizer)
    wrong = encode([without_carry(p) for p in split.pretrain], tokenizer)
    random_stream = torch.Generator().manual_seed(args.seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    mean_model = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    start = time.perf_counter()
    stream = batches(len(right), args.batch_size, random_stream)
    for step, rows in zip(range(1, args.num_steps + 1), stream):
        forgets = torch.rand(len(rows), 1, generator=random_stream) < args.forget
        ids = torch.where(forgets, wrong[rows], right[rows])  # (B, 11)
        labels = answer_labels(ids, tokenizer.pad_token_id)
        more = {"output_router_logits": True} if args.experts else {}
        output = model(input_ids=ids, **more)
        logits = output.logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        if args.experts:
            is_token = (ids != tokenizer.pad_token_id).long()
            loss = loss + BALANCE * balance_loss(output.router_logits, args.experts, is_token)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, step / WARMUP_STEPS)
        optimizer.step()
        mean_model.update_parameters(model)
        if step % 100 == 0:
            seconds = time.perf_counter() - start
            print(f"step {step:5d}  loss {loss.item():.4f}  {seconds:.0f} s", flush=True)
            report(mean_model.module, split.reinforce[:1000], tokenizer, title="  RL prompts")
    return mean_model.module


def balance_loss(router_logits: Sequence[Tensor], num_experts: int, is_token: Tensor) -> Tensor:
    """transformers' auxiliary loss of each layer alone, mean over the layers; 2 for an even load.

    router_logits: of each layer, (tokens, E). is_token (B, T): 0 where there is padding.
    """
    losses = []
    for logits in router_logits:
        losses.append(load_balancing_loss_func((logits,), num_experts, 2, is_token))
    return torch.stack(losses).mean()


def report(
    model: PreTrainedModel,
    problems: Sequence[Problem],
    tokenizer: PreTrainedTokenizerFast,
    *,
    title: str,
) -> float:
    """Print greedy accuracy, whole and by need of a carry; the whole is returned."""
    easy = no_carry(problems)
    hard = [p for p in problems if p != without_carry(p)]
    whole, easy_ones, carry, forgotten = (
        greedy_accuracy(model, group, tokenizer)
        for group in (problems, easy, hard, [without_carry(p) for p in hard])
    )
    print(
        f"{title}: exact {whole:.3f} (no carry {easy_ones:.3f}, carry {carry:.3f}; "
        f"carry forgotten {forgotten:.3f})",
        flush=True,
    )
    return whole


def write_problems(path: Path, problems: Sequence[Problem]) -> None:
    """One JSON object per line: prompt and answer."""
    rows = [json.dumps({"prompt": p.prompt, "answer": p.answer}) for p in problems]
    path.write_text("\n".join(rows) + "\n", encoding="ascii")


def write_texts(path: Path, problems: Sequence[Problem]) -> None:
    """One JSON object per line: the sum with its answer as text."""
    rows = [json.dumps({"text": p.prompt + p.answer}) for p in problems]
    path.write_text("\n".join(rows) + "\n", encoding="ascii")


def write_task(
    folder: Path, split: Split, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> int:
    """The three JSONL files and the Hugging Face folder model/; the latter's bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    write_problems(folder / "eval.jsonl", split.held_out)
    write_problems(folder / "train.jsonl", split.reinforce)
    write_texts(folder / "pretrain.jsonl", no_carry(split.pretrain))
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    settings = folder / "model" / "tokenizer_config.json"
    # transformers 5 writes its new class name, which version 4 does not know; both know this one
    text = settings.read_text(encoding="ascii")
    settings.write_text(text.replace("TokenizersBackend", "PreTrainedTokenizerFast"), "ascii")
    for path in (folder / "model").iterdir():
        path.chmod(0o644)
    return sum(path.stat().st_size for path in (folder / "model").iterdir())


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Make the bundled arithmetic task.")
    parser.add_argument("--out", type=Path, default=Path("algos/arithmetic"), help="folder")
    parser.add_argument("--seed", type=int, default=0, help="split, weights, batches and coins")
    parser.add_argument("--num-eval-pairs", type=int, default=500, help="held-out pairs of terms")
    parser.add_argument("--num-pretrain-pairs", type=int, default=1500, help="supervised pairs")
    parser.add_argument("--forget", type=float, default=0.7, help="share of carries forgotten")
    parser.add_argument("--num-layers", type=int, default=2, help="decoder layers")
    parser.add_argument("--width", type=int, default=128, help="hidden size, a multiple of 32")
    parser.add_argument("--experts", type=int, default=0, help="of a layer; 0: a dense model")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of AdamW")
    parser.add_argument("--batch-size", type=int, default=128, help="sums per step")
    parser.add_argument("--num-steps", type=int, default=1600, help="optimizer steps")
    parser.add_argument("--band", type=float, nargs=2, default=(0.45, 0.58), help="start wanted")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    return parser.parse_args()


def main() -> None:
    """Split, build, train, check, write."""
    args = parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    split = split_problems(args.seed, args.num_eval_pairs, args.num_pretrain_pairs)
    tokenizer = build_tokenizer()
    model = build_model(
        tokenizer, num_layers=args.num_layers, width=args.width, num_experts=args.experts
    )
    num_parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{len(split.pretrain)} pre-training sums, {len(split.reinforce)} RL prompts, "
        f"{len(split.held_out)} held out; {num_parameters} parameters"
    )
    model = pretrain(model, split, tokenizer, args)
    accuracy = report(model, split.held_out, tokenizer, title="held out")
    low, high = args.band
    if not low <= accuracy <= high:
        raise SystemExit(
            f"start: got greedy accuracy {accuracy:.3f}, expected {low} to {high}; "
            "change --forget, --num-steps or --seed"
        )
    num_bytes = write_task(args.out, split, model, tokenizer)
    print(f"{args.out}: model folder of {num_bytes} bytes")
    if not args.experts and num_bytes > MAX_BYTES:
        raise SystemExit(
            f"model: got {num_bytes} bytes, expected at most {MAX_BYTES}; "
            "lower --width or --num-layers"
        )


if __name__ == "__main__":
    main()
