"""Make the bundled game of digits: rows, tokenizer with a chat template and a tiny model.

    python scripts/make_guess.py --out algos/guess

The game (algos/guess/game.py): guess a hidden digit in four turns, told "higher" or "lower" after
each. The model is a Llama with head_dim 32. Its teacher plays badly: with --sense it guesses a
digit that the hints allow, any of them; else it says any token at all. So the model has seen what
a hint means, but seldom heeds it, and wins about one game in five. That guesses should heed the
hints, and halve what is left, only the reward tells.

The command fails, and writes nothing, if the share of games won is outside --band. Same seed, torch
build, machine type and --threads: same files. About a minute on one thread.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

NUM_GUESSES = 4
WORDS = ["guess", "higher", "lower", "digit", *"0123456789"]
SPECIAL = ["<pad>", "<user>", "<policy>", "<end>"]
FIRST_DIGIT = len(SPECIAL) + 4
TEMPLATE = (
    "{% for m in messages %}{{ '<policy>' if m.role == 'assistant' else '<user>' }}"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<policy>{% endif %}"
)
IGNORED = -100


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word; the template marks who speaks."""
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Whitespace()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<end>",
        additional_special_tokens=["<user>", "<policy>"],
        clean_up_tokenization_spaces=False,
        model_max_length=64,
    )
    made.chat_template = TEMPLATE
    return made


def build_model(
    tokenizer: PreTrainedTokenizerFast, *, num_layers: int, width: int
) -> LlamaForCausalLM:
    """A Llama with head_dim 32, fp32, random weights."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=num_layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 32,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def play(stream: random.Random, *, sense: float) -> tuple[list[str], list[bool], bool]:
    """Words of a game that the teacher plays, which of them it said, and whether it won."""
    low = 0
    high = 9
    digit = stream.randrange(10)
    words = ["<user>", "guess"]
    said = [False, False]
    for _ in range(NUM_GUESSES):
        heeds = stream.random() < sense
        guess = str(stream.randint(low, high)) if heeds else stream.choice([*SPECIAL, *WORDS])
        words = [*words, "<policy>", guess]
        said = [*said, False, True]
        if guess == str(digit):
            return words, said, True
        told = "digit"
        if guess.isdigit():
            told = "higher" if digit > int(guess) else "lower"
            low, high = (
                (max(low, int(guess) + 1), high)
                if told == "higher"
                else (low, min(high, int(guess) - 1))
            )
        words = [*words, "<user>", told]
        said = [*said, False, False]
    return words, said, False


def games(
    stream: random.Random, count: int, *, sense: float, ids: dict[str, int]
) -> tuple[Tensor, Tensor]:
    """Token ids and labels (count, 18) of games, padded on the right."""
    rows = torch.zeros(count, 2 + 4 * NUM_GUESSES, dtype=torch.int64)
    labels = torch.full_like(rows, IGNORED)
    for row in range(count):
        words, said, _ = play(stream, sense=sense)
        tokens = torch.tensor([ids[word] for word in words])
        rows[row, : len(words)] = tokens
        labels[row, : len(words)] = torch.where(torch.tensor(said), tokens, IGNORED)
    return rows, labels


@torch.no_grad()
def share_won(model: LlamaForCausalLM, ids: dict[str, int], *, num_games: int, seed: int) -> float:
    """Share of games that the model wins, its tokens sampled."""
    noise = torch.Generator().manual_seed(seed)
    digits = torch.arange(num_games) % 10 + ids["0"]
    rows = torch.tensor([[ids["<user>"], ids["guess"]]]).repeat(num_games, 1)
    won = torch.zeros(num_games, dtype=torch.bool)
    for _ in range(NUM_GUESSES):
        rows = torch.cat([rows, torch.full((num_games, 1), ids["<policy>"])], 1)
        probs = model(input_ids=rows).logits[:, -1].softmax(-1)
        said = torch.multinomial(probs, 1, generator=noise)[:, 0]
        won |= said == digits
        told = torch.where(digits > said, ids["higher"], ids["lower"])
        told = torch.where(said < ids["0"], ids["digit"], told)
        user = torch.full_like(told, ids["<user>"])
        rows = torch.cat([rows, said[:, None], user[:, None], told[:, None]], 1)
    return won.float().mean().item()


def pretrain(model: LlamaForCausalLM, ids: dict[str, int], args: argparse.Namespace) -> None:
    """args.num_steps steps of cross-entropy on what the teacher says."""
    stream = random.Random(args.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    for step in range(1, args.num_steps + 1):
        rows, labels = games(stream, args.batch_size, sense=args.sense, ids=ids)
        logits = model(input_ids=rows).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            won = share_won(model, ids, num_games=2000, seed=step)
            print(f"step {step:5d}  loss {loss.item():.4f}  won {won:.3f}", flush=True)


def write_rows(path: Path, count: int, prompt: str) -> None:
    """One JSON object per line: the digits in turn."""
    rows = [json.dumps({"prompt": prompt, "digit": number % 10}) for number in range(count)]
    path.write_text("\n".join(rows) + "\n", encoding="ascii")


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Make the bundled game of digits.")
    parser.add_argument("--out", type=Path, default=Path("algos/guess"), help="folder")
    parser.add_argument("--seed", type=int, default=0, help="weights and games")
    parser.add_argument("--sense", type=float, default=0.1, help="share of guesses that heed hints")
    parser.add_argument("--num-layers", type=int, default=2, help="decoder layers")
    parser.add_argument("--width", type=int, default=64, help="hidden size, a multiple of 32")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate of AdamW")
    parser.add_argument("--batch-size", type=int, default=128, help="games per step")
    parser.add_argument("--num-steps", type=int, default=500, help="optimizer steps")
    parser.add_argument("--band", type=float, nargs=2, default=(0.17, 0.25), help="start wanted")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    return parser.parse_args()


def main() -> None:
    """Build, train, check, write."""
    args = parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer()
    ids = tokenizer.get_vocab()
    model = build_model(tokenizer, num_layers=args.num_layers, width=args.width)
    pretrain(model, ids, args)
    won = share_won(model, ids, num_games=10_000, seed=0)
    print(f"{sum(p.numel() for p in model.parameters())} parameters, {won:.3f} of the games won")
    low, high = args.band
    if not low <= won <= high:
        raise SystemExit(f"start: got {won:.3f}, expected {low} to {high}; change --sense")
    args.out.mkdir(parents=True, exist_ok=True)
    write_rows(args.out / "train.jsonl", 1000, "guess")
    write_rows(args.out / "eval.jsonl", 100, "guess")
    model.save_pretrained(args.out / "model")
    tokenizer.save_pretrained(args.out / "model")
    settings = args.out / "model" / "tokenizer_config.json"
    # transformers 5 writes its new class name, which version 4 does not know; both know this one
    text = settings.read_text(encoding="utf-8")
    settings.write_text(text.replace("TokenizersBackend", "PreTrainedTokenizerFast"), "utf-8")
    for path in (args.out / "model").iterdir():
        path.chmod(0o644)


if __name__ == "__main__":
    main()
