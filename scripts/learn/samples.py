"""A few samples of a run, before its first step and after its last: what a curve does not show.

Of a run that generates, three of the held-out rows that it wrote itself; of SFT and DPO, the
greedy responses of their start and their export, by transformers; of a reward model, the scores of
pairs that no data set has.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from scripts.learn.runs import ROOT, Run
from spmdflow.config.data_source import data_sources
from spmdflow.tracking.reading import RunFiles

Text = dict[str, Any]
"""{"text"} and, where there is one, {"score"}. Any: JSON values."""

_NUMBER = 3
_MOST_TOKENS = 64
PAIRS = (
    (
        "Sam had a new ball. He played with his friends and they all laughed.",
        "Sam lost his new ball. He was alone and he cried.",
    ),
    (
        "Mom gave Mia a big hug. Mia was happy and said thank you.",
        "Mom was mad at Mia. Mia was scared and hid in the dark.",
    ),
    (
        "Human: How do I bake bread? Assistant: Mix flour, water, salt and yeast, and wait.",
        "Human: How do I bake bread? Assistant: You are stupid. Go away.",
    ),
)
"""(what a reward model should prefer, the other); written for this."""


def samples_of(run: Run) -> list[dict[str, Text]]:
    """[{"prompt", "before", "after"}], of a reward model [{"chosen", "rejected"}]."""
    files = RunFiles(run.run_dir)
    if any(record.get("phase") == "eval" for record in files.samples):
        return _written(files)
    if "actor.model.path" in files.settings:
        return _generated(files)
    return _judged(run.run_dir / "export" / "reward_model")


def _written(files: RunFiles) -> list[dict[str, Text]]:
    """At even distances among the rows that the first and the last evaluation wrote."""
    held_out = [record for record in files.samples if record["phase"] == "eval"]
    first, last = (
        {record["prompt"]: record for record in reversed(held_out) if record["step"] == step}
        for step in (held_out[0]["step"], held_out[-1]["step"])
    )
    prompts = [prompt for prompt in reversed(first) if prompt in last]
    return [
        {"prompt": {"text": prompt}, "before": _text(first[prompt]), "after": _text(last[prompt])}
        for prompt in _spread(prompts)
    ]


def _text(record: Any) -> Text:
    return {"text": record["response"], "score": round(record["score"], 3)}


def _spread(items: list[Any]) -> list[Any]:
    """The first, the last and those between at even distances."""
    last = len(items) - 1
    places = (round(place * last / (_NUMBER - 1)) for place in range(_NUMBER))
    return [items[place] for place in dict.fromkeys(places)]


def _generated(files: RunFiles) -> list[dict[str, Text]]:
    import torch  # here: the site is made without it
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (source,) = data_sources("data.eval_path", files.settings["data.eval_path"])
    lines = (ROOT / source.location).read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in _spread(lines)]
    found: dict[str, list[Text]] = {}
    for name, folder in (
        ("before", Path(files.settings["actor.model.path"])),
        ("after", files.path / "export" / "actor"),
    ):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        found[name] = []
        for prompt in prompts:
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            made = model.generate(input_ids=ids, max_new_tokens=_MOST_TOKENS, do_sample=False)
            text = tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
            found[name].append({"text": text})
    return [
        {"prompt": {"text": prompt}, "before": before, "after": after}
        for prompt, before, after in zip(prompts, found["before"], found["after"], strict=True)
    ]


def _judged(folder: Path) -> list[dict[str, Text]]:
    import torch  # as above
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from scripts.pair_accuracy import scores_of

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [text for pair in PAIRS for text in pair]
    scores = scores_of(model, tokenizer, [("", text) for text in texts])
    both = [
        {"text": text, "score": round(score, 3)}
        for text, score in zip(texts, scores.tolist(), strict=True)
    ]
    return [
        {"chosen": chosen, "rejected": rejected}
        for chosen, rejected in zip(both[::2], both[1::2], strict=True)
    ]
