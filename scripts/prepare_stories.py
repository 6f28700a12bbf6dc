"""Make the folder that algos/ppo_stories.yaml trains on, or verify a ready one.

    python scripts/prepare_stories.py --from SOURCES --out DATA    # then export SPMDFLOW_DATA=DATA
    python scripts/prepare_stories.py --verify DATA

SOURCES holds the public sources:

    models/stories260K/        pre-trained writer, Hugging Face format (karpathy/tinyllamas)
    tinystories/stories.jsonl  complete stories {"text": ...} (Eldan and Li's TinyStories)
    vader/vader_lexicon.txt    word sentiments (cjhutto/vaderSentiment)

DATA gets, beside copies of the stories and the lexicon:

    models/stories260K-hd64/           the same function, zero-padded to --head-dim and --mlp-width,
                                       as vLLM has no kernel for head_dim 8
    tinystories/prompts.train.jsonl    openings {"prompt", "story_index"}
    tinystories/prompts.test.jsonl     openings of other stories
    models/stories260K-hd64-rm-vader/  a reward model for cheerful stories

The padded model is always made, from stories260K. Prompts and reward model are copied if SOURCES
has them under these names, unless --remake asks to make them too: prompts by --seed from the
stories, the reward model (two minutes on one thread) by Bradley-Terry on beginnings of stories
ordered by the lexicon, scaled to a standard deviation of 1.5 on them. A new reward model is another
judge: the rewards in docs/STORIES.md are those of the one that was given.

Every run ends by verifying what it wrote; a fault is the exit code 1 and a sentence.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
)
from transformers.utils import logging

from spmdflow.rewards.sentiment import lexicon_score, load_lexicon

SOURCE = "models/stories260K"
PADDED = "models/stories260K-hd64"
REWARD = "models/stories260K-hd64-rm-vader"
STORIES = "tinystories/stories.jsonl"
LEXICON = "vader/vader_lexicon.txt"
TRAIN = "tinystories/prompts.train.jsonl"
TEST = "tinystories/prompts.test.jsonl"
LEAST_OPENING = 40  # characters; a shorter first sentence takes the next one along
STORY_TOKENS = 64  # of a story after its opening, as in the run
LOGIT_TOLERANCE = 1e-4  # float32, logits of about 10: rounding in another order
SCORE_SPREAD = 1.5  # standard deviation of a new reward model, so that one KL weight fits all
LEAST_ACCURACY = 0.75  # of a reward model on pairs of test stories
SENTENCE_END = re.compile(r"[.!?](?=\s)")


def padded_state(
    state: Mapping[str, Tensor], config: Any, *, head_dim: int, mlp_width: int
) -> dict[str, Tensor]:
    """The tensors of a Llama with wider heads and MLP that computes the same function.

    Rotary embeddings turn dimension i of a head together with i + d/2 by an angle that falls with
    theta^(-2i/d). Widened by m = D/d, dimension i goes to i m: there the angle is theta^(-2im/D),
    the same, and its partner goes to i m + D/2. Scores are divided by sqrt(D) instead of sqrt(d),
    so queries grow by sqrt(m). All else is zero, and so are the gradients there.
    """
    old = config.head_dim
    factor, rest = divmod(head_dim, old)
    if rest or not factor or mlp_width < config.intermediate_size:
        raise SystemExit(
            f"padding: got head_dim {head_dim} and MLP width {mlp_width}, expected a multiple of "
            f"{old} and at least {config.intermediate_size}; change --head-dim or --mlp-width"
        )
    places = torch.arange(old) * factor
    made = {}
    for name, tensor in state.items():
        kind = name.split(".")[-2]
        if kind in ("q_proj", "k_proj", "v_proj"):
            tensor = tensor * (factor**0.5 if kind == "q_proj" else 1.0)
            tensor = _widened(tensor.unflatten(0, (-1, old)), 1, places, head_dim).flatten(0, 1)
        elif kind == "o_proj":
            tensor = _widened(tensor.unflatten(1, (-1, old)), 2, places, head_dim).flatten(1, 2)
        elif kind in ("gate_proj", "up_proj"):
            tensor = _widened(tensor, 0, torch.arange(len(tensor)), mlp_width)
        elif kind == "down_proj":
            tensor = _widened(tensor, 1, torch.arange(tensor.shape[1]), mlp_width)
        made[name] = tensor
    return made


def _widened(tensor: Tensor, dim: int, places: Tensor, size: int) -> Tensor:
    """Zeros of that size along dim, with the tensor's slices at the places."""
    shape = list(tensor.shape)
    shape[dim] = size
    return tensor.new_zeros(shape).index_copy(dim, places, tensor)


def padded_model(model: PreTrainedModel, *, head_dim: int, mlp_width: int) -> PreTrainedModel:
    """A model of the same class with wider heads and MLP, and the same outputs."""
    config = type(model.config).from_dict(
        model.config.to_dict() | {"head_dim": head_dim, "intermediate_size": mlp_width}
    )
    state = padded_state(model.state_dict(), model.config, head_dim=head_dim, mlp_width=mlp_width)
    wide = type(model)(config).to(model.dtype)
    wide.load_state_dict(state)
    return wide.eval()


def opening_of(story: str) -> str | None:
    """Its first sentence, with the second if that is short and on the same line; None: no end."""
    line = story.split("\n")[0] + " "
    ends = [match.end() for match in SENTENCE_END.finditer(line)][:2]
    if not ends:
        return None
    return line[: ends[0] if ends[0] >= LEAST_OPENING else ends[-1]]


def make_prompts(
    stories: Sequence[str], *, num_train: int, num_test: int, seed: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of train and test prompts: different openings of different stories, shuffled."""
    first: dict[str, int] = {}
    for index, story in enumerate(stories):
        opening = opening_of(story)
        if opening is not None:
            first.setdefault(opening, index)
    rows = [{"prompt": prompt, "story_index": index} for prompt, index in first.items()]
    if len(rows) < num_train + num_test:
        raise SystemExit(
            f"prompts: got {len(rows)} different openings of {len(stories)} stories, expected "
            f"{num_train} + {num_test}; lower --num-train or --num-test"
        )
    random.Random(seed).shuffle(rows)
    return rows[num_test : num_test + num_train], rows[:num_test]


def beginnings(
    stories: Sequence[str], tokenizer: Any, lexicon: Mapping[str, float]
) -> tuple[list[Tensor], Tensor]:
    """Token ids of each opening with STORY_TOKENS more, and the sentiment of these texts."""
    openings = [opening_of(story) or "" for story in stories]
    sizes = [len(ids) + STORY_TOKENS for ids in tokenizer(openings).input_ids]
    rows = [ids[:size] for ids, size in zip(tokenizer(list(stories)).input_ids, sizes)]
    texts = tokenizer.batch_decode(rows, skip_special_tokens=True)
    sentiments = torch.tensor([lexicon_score(text, lexicon) for text in texts])
    return [torch.tensor(row) for row in rows], sentiments


def scores_of(model: Any, rows: Sequence[Tensor]) -> Tensor:
    """The reward of each row: the head's output at its last token. Any: a Llama with one label."""
    joined = pad_sequence(list(rows), batch_first=True)  # right padding: causal, needs no mask
    hidden = model.model(input_ids=joined, use_cache=False).last_hidden_state
    last = torch.tensor([len(row) - 1 for row in rows])
    return model.score(hidden[torch.arange(len(rows)), last]).squeeze(-1)


@torch.no_grad()
def all_scores(model: Any, rows: Sequence[Tensor]) -> Tensor:
    """The same without gradient, 64 rows at a time."""
    return torch.cat([scores_of(model, rows[i : i + 64]) for i in range(0, len(rows), 64)])


def ordered_gaps(scores: Tensor, sentiments: Tensor) -> Tensor:
    """score_i - score_j of every pair (i, j) with sentiment_i > sentiment_j."""
    happier = sentiments[:, None] > sentiments[None]
    return (scores[:, None] - scores[None])[happier]


def pair_accuracy(model: Any, rows: Sequence[Tensor], sentiments: Tensor) -> float:
    """Share of all pairs that the model orders as the lexicon does."""
    return float((ordered_gaps(all_scores(model, rows), sentiments) > 0).float().mean())


def train_reward_model(
    model: Any, rows: Sequence[Tensor], sentiments: Tensor, args: argparse.Namespace
) -> None:
    """Bradley-Terry: -log sigmoid(score_i - score_j) over all ordered pairs of a batch.

    The head is scaled at the end; it has no bias, so the order of scores stays.
    """
    torch.nn.init.zeros_(model.score.weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    stream = batches(len(rows), args.batch_size, torch.Generator().manual_seed(args.seed))
    for step in range(1, args.num_steps + 1):
        index = next(stream)
        scores = scores_of(model, [rows[i] for i in index.tolist()])
        loss = -logsigmoid(ordered_gaps(scores, sentiments[index])).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, step / 20, 2 * (1 - (step - 1) / args.num_steps))
        optimizer.step()
        if step % 50 == 0:
            print(f"reward model: step {step}, loss {loss.item():.3f}", flush=True)
    with torch.no_grad():
        model.score.weight *= SCORE_SPREAD / all_scores(model, rows).std()


def batches(num_rows: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Row numbers (size,), epoch after epoch without end; an epoch's odd rest is left."""
    while True:
        order = torch.randperm(num_rows, generator=generator)
        yield from order[: num_rows - num_rows % size].split(size)


def verify(data: Path) -> list[str]:
    """What holds for a ready folder, one sentence each; SystemExit at the first fault."""
    stories = [row["text"] for row in read_rows(data / STORIES)]
    train = read_rows(data / TRAIN)
    test = read_rows(data / TEST)
    found = [verify_prompts(train, test, stories)]
    if (data / SOURCE).is_dir():
        found.append(verify_padding(data / SOURCE, data / PADDED, [row["prompt"] for row in test]))
    else:
        load(AutoModelForCausalLM, data / PADDED)
        found.append(f"{PADDED}: loads; without {SOURCE} its logits are not compared")
    return [*found, verify_reward_model(data, [stories[row["story_index"]] for row in test])]


def verify_prompts(
    train: Sequence[Mapping[str, Any]], test: Sequence[Mapping[str, Any]], stories: Sequence[str]
) -> str:
    """Each prompt opens its story; no prompt and no story is in both files."""
    for row in (*train, *test):
        if opening_of(stories[row["story_index"]]) != row["prompt"]:
            raise SystemExit(f"prompts: {row} is not how its story opens; make them with --remake")
    for key in ("prompt", "story_index"):
        both = {row[key] for row in train} & {row[key] for row in test}
        if both:
            raise SystemExit(f"prompts: {key} {min(both)!r} is in train and test, expected one")
    return f"prompts: {len(train)} to train, {len(test)} to test, no opening and no story in both"


@torch.no_grad()
def verify_padding(source: Path, padded: Path, texts: Sequence[str]) -> str:
    """Equal logits on the texts."""
    batch = AutoTokenizer.from_pretrained(source)(list(texts)).input_ids
    ids = pad_sequence([torch.tensor(row) for row in batch], batch_first=True)
    small, wide = (load(AutoModelForCausalLM, folder) for folder in (source, padded))
    gap = float((small(input_ids=ids).logits - wide(input_ids=ids).logits).abs().max())
    if gap > LOGIT_TOLERANCE:
        raise SystemExit(
            f"{padded}: got logits {gap:.2g} away from those of {source}, expected at most "
            f"{LOGIT_TOLERANCE}; make it again with --from"
        )
    return f"{PADDED}: logits within {gap:.1g} of {SOURCE} on {len(texts)} prompts"


def verify_reward_model(data: Path, stories: Sequence[str]) -> str:
    """One label, and the lexicon's order on pairs of the stories."""
    model = load(AutoModelForSequenceClassification, data / REWARD)
    if model.config.num_labels != 1:
        raise SystemExit(f"{REWARD}: got {model.config.num_labels} labels, expected 1 (a reward)")
    tokenizer = AutoTokenizer.from_pretrained(data / REWARD)
    rows, sentiments = beginnings(stories, tokenizer, load_lexicon(data / LEXICON))
    accuracy = pair_accuracy(model, rows, sentiments)
    if accuracy < LEAST_ACCURACY:
        raise SystemExit(
            f"{REWARD}: got pair accuracy {accuracy:.3f} on test stories, expected at least "
            f"{LEAST_ACCURACY}; train it longer (--remake --num-steps)"
        )
    return f"{REWARD}: pair accuracy {accuracy:.3f} on {len(stories)} test stories"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file."""
    if not path.is_file():
        raise SystemExit(f"{path}: no such file, expected one; see --help for the folder's layout")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """One JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def load(auto: Any, folder: Path, **settings: Any) -> Any:
    """A transformers model in float32 on the CPU."""
    if not (folder / "config.json").is_file():
        raise SystemExit(f"{folder}: no config.json, expected a Hugging Face folder; see --help")
    return auto.from_pretrained(folder, dtype=torch.float32, **settings).eval()


def save(model: Any, source: Path, folder: Path) -> None:
    """A model folder with the tokenizer of the source."""
    model.save_pretrained(folder)
    for path in [*source.glob("tokenizer*"), *source.glob("generation_config.json")]:
        shutil.copyfile(path, folder / path.name)


def copy(sources: Path, out: Path, *names: str) -> None:
    """Take files and folders over as they are."""
    for name in names:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        if (sources / name).is_dir():
            shutil.copytree(sources / name, out / name, dirs_exist_ok=True)
        else:
            shutil.copyfile(sources / name, out / name)
    print(f"copied: {', '.join(names)}")


def make(args: argparse.Namespace) -> None:
    """Write every part to args.out, saying whether it is made or copied."""
    sources = args.sources
    out = args.out
    sizes = {"head_dim": args.head_dim, "mlp_width": args.mlp_width}
    stories = [row["text"] for row in read_rows(sources / STORIES)]
    model = load(AutoModelForCausalLM, sources / SOURCE)
    copy(sources, out, STORIES, LEXICON, SOURCE)
    save(padded_model(model, **sizes), sources / SOURCE, out / PADDED)
    print(f"made: {PADDED}")
    if args.remake or not (sources / TRAIN).is_file():
        number = {"num_train": args.num_train, "num_test": args.num_test}
        for name, rows in zip((TRAIN, TEST), make_prompts(stories, **number, seed=args.seed)):
            write_rows(out / name, rows)
        print(f"made: {TRAIN}, {TEST}")
    else:
        copy(sources, out, TRAIN, TEST)
    if args.remake or not (sources / REWARD).is_dir():
        make_reward_model(args, stories, sizes)
        print(f"made: {REWARD}")
    else:
        copy(sources, out, REWARD)


def make_reward_model(
    args: argparse.Namespace, stories: Sequence[str], sizes: Mapping[str, int]
) -> None:
    """Train on every story but the test prompts', at the small size; write it padded."""
    torch.manual_seed(args.seed)
    folder = args.out / SOURCE
    model = load(AutoModelForSequenceClassification, folder, num_labels=1)
    held_out = {row["story_index"] for row in read_rows(args.out / TEST)}
    learned = [story for index, story in enumerate(stories) if index not in held_out]
    lexicon = load_lexicon(args.out / LEXICON)
    rows, sentiments = beginnings(learned, AutoTokenizer.from_pretrained(folder), lexicon)
    train_reward_model(model, rows, sentiments, args)
    save(padded_model(model, **sizes), folder, args.out / REWARD)


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--from", dest="sources", type=Path, help="folder of sources")
    parser.add_argument("--out", type=Path, help="folder to make")
    parser.add_argument("--verify", type=Path, help="ready folder: only verify it")
    parser.add_argument(
        "--remake", action="store_true", help="copy neither prompts nor reward model"
    )
    parser.add_argument("--head-dim", type=int, default=64, help="of the padded models")
    parser.add_argument("--mlp-width", type=int, default=192, help="of the padded models")
    parser.add_argument("--num-train", type=int, default=1000, help="prompts made to train on")
    parser.add_argument("--num-test", type=int, default=200, help="prompts made to test on")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and reward model")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak rate of the reward model")
    parser.add_argument(
        "--batch-size", type=int, default=64, help="stories whose pairs make a step"
    )
    parser.add_argument("--num-steps", type=int, default=200, help="steps of the reward model")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    args = parser.parse_args()
    if (args.verify is None) != (args.sources is not None and args.out is not None):
        parser.error("give --from and --out together, or --verify alone")
    return args


def main() -> None:
    """Make the folder if asked to, then verify it."""
    args = parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    if args.verify is None:
        make(args)
    for sentence in verify(args.verify or args.out):
        print(sentence)


if __name__ == "__main__":
    main()
