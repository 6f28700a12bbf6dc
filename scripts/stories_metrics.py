"""Judge story writers: reward, KL, repetition and sentiment of 64-token responses.

    python scripts/stories_metrics.py --run runs/stories [--data $SPMDFLOW_DATA] [--json out.json]
    python scripts/stories_metrics.py --model FOLDER [--model FOLDER ...]

Compares the pre-trained model with models trained from it: Hugging Face folders (--model), or
every checkpoint's export in a RUN_DIR (--run). Generation and scoring are transformers' own, so
that the numbers do not rest on the code under test. Each draw is one sampled response (temperature
1) to each test prompt; a greedy one stands beside the sampled ones. Columns:

    reward      mean output of the reward model at the last token, +- its standard error
    KL          sum over a response of log p - log p_reference, of the sampled tokens, in nats
    3-grams     distinct ones / all, of token ids: mean within a response, and over all of a draw
    VADER       mean of spmdflow.rewards.sentiment.lexicon_score, from -1 to 1
    ended       share of responses that ended within the limit
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging

from spmdflow.rewards.sentiment import lexicon_score, load_lexicon

REFERENCE = "models/stories260K-hd64"
REWARD = "models/stories260K-hd64-rm-vader"
PROMPTS = "tinystories/prompts.test.jsonl"
LEXICON = "vader/vader_lexicon.txt"
Ids = list[int]


@dataclass(frozen=True)
class Responses:
    """One response for each prompt, and what its tokens and text are worth."""

    texts: list[str]
    ids: list[Ids]
    rewards: list[float]
    kls: list[float]
    sentiments: list[float]
    ended: list[bool]


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    model: str
    sampling: str
    num_responses: int
    reward: float
    reward_error: float
    kl: float
    within: float
    corpus: float
    vader: float
    ended: float
    tokens: float


class Judge:
    """The prompts, the reference, the reward model and the lexicon of a data folder."""

    def __init__(self, data: Path, *, max_new_tokens: int, num_prompts: int) -> None:
        """num_prompts: judge with the first so many; 0 for all."""
        lines = (data / PROMPTS).read_text(encoding="utf-8").splitlines()
        self.prompts: list[str] = [json.loads(line)["prompt"] for line in lines][
            : num_prompts or None
        ]
        self.tokenizer = AutoTokenizer.from_pretrained(data / REFERENCE)
        self.reference = load_writer(data / REFERENCE)
        self.reward = AutoModelForSequenceClassification.from_pretrained(data / REWARD).eval()
        self.lexicon = load_lexicon(data / LEXICON)
        self._prompt_ids: list[Ids] = self.tokenizer(self.prompts).input_ids
        self._max_new_tokens = max_new_tokens

    def respond(self, writer: Any, *, greedy: bool, seed: int) -> Responses:
        """Have a causal LM continue every prompt, and score what it wrote."""
        ids = self._generate(writer, greedy=greedy, seed=seed)
        rows = [torch.tensor(p + r) for p, r in zip(self._prompt_ids, ids, strict=True)]
        joined = pad_sequence(rows, batch_first=True)  # right padding: causal, needs no mask
        gap = self._log_probs(writer, joined, ids) - self._log_probs(self.reference, joined, ids)
        hidden = self.reward.model(input_ids=joined).last_hidden_state
        last = torch.tensor([len(row) - 1 for row in rows])
        scores = self.reward.score(hidden[torch.arange(len(rows)), last]).squeeze(-1)
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        return Responses(
            texts,
            ids,
            scores.tolist(),
            gap.tolist(),
            [lexicon_score(text, self.lexicon) for text in texts],
            [row[-1] == self.tokenizer.eos_token_id for row in ids],
        )

    def _generate(self, writer: Any, *, greedy: bool, seed: int) -> list[Ids]:
        """Response tokens, the end of the story included; eos = bos, so ends go by position."""
        torch.manual_seed(seed)
        batch = self.tokenizer(self.prompts, return_tensors="pt", padding=True)
        drawn = writer.generate(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            max_new_tokens=self._max_new_tokens,
            do_sample=not greedy,
            top_k=0,
        )
        eos = self.tokenizer.eos_token_id
        rows = drawn[:, batch.input_ids.shape[1] :].tolist()
        return [row[: row.index(eos) + 1] if eos in row else row for row in rows]

    def _log_probs(self, model: Any, joined: Tensor, ids: list[Ids]) -> Tensor:
        """Log-probability of each whole response, (B,)."""
        log_probs = model(input_ids=joined[:, :-1]).logits.log_softmax(-1)  # (B, T-1, V)
        taken = log_probs.gather(-1, joined[:, 1:, None]).squeeze(-1)  # (B, T-1)
        starts = [len(prompt) - 1 for prompt in self._prompt_ids]
        return torch.stack(
            [row[s : s + len(r)].sum() for row, s, r in zip(taken, starts, ids, strict=True)]
        )


def load_writer(folder: Path) -> Any:
    """A causal LM in float32; Any: a transformers model."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def trigrams(ids: Sequence[int]) -> list[tuple[int, ...]]:
    """Every run of three tokens."""
    return [tuple(ids[start : start + 3]) for start in range(len(ids) - 2)]


def distinct_share(grams: Sequence[tuple[int, ...]]) -> float:
    """Distinct ones / all; 1 where there is none."""
    return len(set(grams)) / len(grams) if grams else 1.0


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean."""
    return sum(values) / len(values)


def row_of(model: str, sampling: str, draws: Sequence[Responses]) -> Row:
    """The table's line for all draws of a model: means over responses, or over draws."""
    rewards = torch.tensor([score for draw in draws for score in draw.rewards])
    grams = [[trigrams(ids) for ids in draw.ids] for draw in draws]
    return Row(
        model,
        sampling,
        num_responses=len(rewards),
        reward=float(rewards.mean()),
        reward_error=float(rewards.std() / len(rewards) ** 0.5),
        kl=mean([kl for draw in draws for kl in draw.kls]),
        within=mean([distinct_share(row) for draw in grams for row in draw]),
        corpus=mean([distinct_share(list(chain.from_iterable(draw))) for draw in grams]),
        vader=mean([score for draw in draws for score in draw.sentiments]),
        ended=mean([float(ended) for draw in draws for ended in draw.ended]),
        tokens=mean([float(len(ids)) for draw in draws for ids in draw.ids]),
    )


def table(rows: Sequence[Row]) -> str:
    """The rows in Markdown."""
    head = "| model | sampling | n | reward | KL | 3-grams within | over corpus | VADER | ended |"
    lines = [head, "|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        kl = f"{row.kl:.1f}" if row.sampling == "sampled" else "-"  # greedy tokens are no sample
        lines.append(
            f"| {row.model} | {row.sampling} | {row.num_responses} "
            f"| {row.reward:.2f} +- {row.reward_error:.2f} | {kl} "
            f"| {row.within:.3f} | {row.corpus:.3f} | {row.vader:.2f} | {row.ended:.3f} |"
        )
    return "\n".join(lines)


def samples(judge: Judge, drawn: Responses, *, number: int, seed: int) -> str:
    """So many prompts drawn by seed, with response, reward and VADER score, in Markdown."""
    places = random.Random(seed).sample(range(len(judge.prompts)), number)
    return "\n".join(
        f"{count}. *{judge.prompts[place]}* {' '.join(drawn.texts[place].split())} "
        f"({drawn.rewards[place]:.2f}; {drawn.sentiments[place]:.2f})"
        for count, place in enumerate(places, start=1)
    )


def exports_of(run_dir: Path) -> dict[str, Path]:
    """Name -> Hugging Face folder of every checkpoint of a run, in the order of steps."""
    folders = sorted(
        (run_dir / "checkpoints").glob("step-*/**/hugging_face"),
        key=lambda folder: int(folder.relative_to(run_dir).parts[1].removeprefix("step-")),
    )
    if not folders:
        raise SystemExit(
            f"{run_dir}: got no checkpoints/step-*/**/hugging_face, expected a run that saved; "
            f"set save_every"
        )
    return {folder.relative_to(run_dir).parts[1]: folder for folder in folders}


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    data = os.environ.get("SPMDFLOW_DATA")
    parser.add_argument("--data", type=Path, default=data, required=data is None, help="folder")
    parser.add_argument("--run", type=Path, help="RUN_DIR, whose checkpoints are judged")
    parser.add_argument("--model", type=Path, action="append", default=[], help="model folder")
    parser.add_argument("--seed", type=int, default=0, help="of draws and of the samples shown")
    parser.add_argument("--draws", type=int, default=4, help="sampled responses per prompt")
    parser.add_argument("--num-prompts", type=int, default=0, help="first so many (0: all)")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="longest response")
    parser.add_argument("--samples", type=int, default=10, help="responses shown of the last model")
    parser.add_argument("--json", type=Path, help="also write the rows there")
    parser.add_argument("--no-start", action="store_true", help="leave the start out")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    return parser.parse_args()


@torch.no_grad()
def main() -> None:
    """Judge the start and every model, print the table and samples of the last one."""
    args = parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    folders = {} if args.no_start else {"start": args.data / REFERENCE}
    folders |= {path.name: path for path in args.model}
    folders |= exports_of(args.run) if args.run else {}
    judge = Judge(args.data, max_new_tokens=args.max_new_tokens, num_prompts=args.num_prompts)
    rows = []
    for name, folder in folders.items():
        writer = load_writer(folder)
        seeds = range(args.seed, args.seed + args.draws)
        drawn = [judge.respond(writer, greedy=False, seed=seed) for seed in seeds]
        rows.append(row_of(name, "sampled", drawn))
        rows.append(row_of(name, "greedy", [judge.respond(writer, greedy=True, seed=args.seed)]))
    print(table(rows))
    print(f"\n{name}, sampled (reward; VADER), drawn by seed {args.seed}:\n")
    print(samples(judge, drawn[0], number=args.samples, seed=args.seed))
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
