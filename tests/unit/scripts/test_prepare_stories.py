"""scripts/prepare_stories.py: padding keeps the function, prompts and pairs follow their rules."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from scripts.prepare_stories import (
    PADDED,
    REWARD,
    TEST,
    TRAIN,
    all_scores,
    main,
    make_prompts,
    opening_of,
    ordered_gaps,
    padded_model,
    pair_accuracy,
    scores_of,
    train_reward_model,
    verify_prompts,
)
from scripts.stories_metrics import distinct_share, trigrams

NEEDS_DATA = pytest.mark.skipif(
    "SPMDFLOW_DATA" not in os.environ, reason="SPMDFLOW_DATA names no data folder"
)
LONG = "Once upon a time there was a little mouse in a big house."


def small_config(**changes) -> LlamaConfig:
    sizes = {"hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaConfig(vocab_size=50, pad_token_id=2, **(sizes | heads | changes))


def random_model(model_class=LlamaForCausalLM, **changes):
    torch.manual_seed(0)
    model = model_class(small_config(**changes)).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


# Padding; in double precision, where another order of sums costs 1e-12 and a wrong place all


@pytest.mark.parametrize(("head_dim", "mlp_width"), [(8, 44), (16, 44), (64, 64), (24, 45)])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_a_padded_model_has_the_logits_of_the_small_one(head_dim, mlp_width, num_kv_heads):
    small = random_model(num_key_value_heads=num_kv_heads)
    ids = torch.randint(50, (3, 20))

    wide = padded_model(small, head_dim=head_dim, mlp_width=mlp_width)

    assert wide.config.head_dim == head_dim and wide.config.intermediate_size == mlp_width
    torch.testing.assert_close(wide(ids).logits, small(ids).logits, rtol=1e-9, atol=1e-9)


def test_padding_has_no_gradient():
    wide = padded_model(random_model(), head_dim=16, mlp_width=50)
    ids = torch.randint(50, (2, 10))

    wide(ids, labels=ids).loss.backward()

    for name, parameter in wide.named_parameters():
        assert parameter.grad[parameter == 0].abs().sum() == 0, name


def test_a_padded_reward_model_has_the_scores_of_the_small_one():
    small = random_model(LlamaForSequenceClassification, num_labels=1)
    rows = [torch.arange(3, 3 + size) for size in (1, 7, 4)]

    wide = padded_model(small, head_dim=64, mlp_width=64)

    torch.testing.assert_close(scores_of(wide, rows), scores_of(small, rows), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("sizes", [(12, 44), (4, 44), (16, 43)])
def test_sizes_that_cannot_hold_the_model_are_refused_with_the_numbers(sizes):
    with pytest.raises(SystemExit, match=rf"got head_dim {sizes[0]} and MLP width {sizes[1]}"):
        padded_model(random_model(), head_dim=sizes[0], mlp_width=sizes[1])


# Prompts


@pytest.mark.parametrize(
    ("story", "opening"),
    [
        (LONG + " It ran.", LONG),
        ("Tim had a dog. It was big. It ran.", "Tim had a dog. It was big."),
        ("It was hot.\nTim had a dog.", "It was hot."),
        ("Tim is 3.5 years old. He ran! It rained.", "Tim is 3.5 years old. He ran!"),
        ("No end", None),
    ],
)
def test_an_opening_is_a_sentence_or_two_short_ones_of_the_first_line(story, opening):
    assert opening_of(story) == opening


def test_prompts_are_different_openings_of_different_stories():
    stories = [LONG.replace("mouse", name) for name in ("cat", "dog", "cow", "cat", "owl")]

    train, test = make_prompts(stories, num_train=3, num_test=1, seed=0)

    assert sorted(row["story_index"] for row in train + test) == [0, 1, 2, 4]
    assert all(stories[row["story_index"]] == row["prompt"] for row in train + test)
    assert make_prompts(stories, num_train=3, num_test=1, seed=0) == (train, test)


def test_more_prompts_than_openings_are_refused_with_both_numbers():
    with pytest.raises(SystemExit, match=r"got 1 different openings of 2 stories, expected 2 \+ 1"):
        make_prompts([LONG, LONG], num_train=2, num_test=1, seed=0)


def test_a_prompt_in_train_and_test_is_found():
    row = {"prompt": LONG, "story_index": 0}

    with pytest.raises(SystemExit, match="is in train and test"):
        verify_prompts([row], [row], [LONG])


def test_a_prompt_that_is_not_its_storys_opening_is_found():
    with pytest.raises(SystemExit, match="is not how its story opens"):
        verify_prompts([{"prompt": "Other.", "story_index": 0}], [], [LONG])


# Reward model


def test_gaps_are_of_every_pair_the_happier_text_first_and_ties_left_out():
    gaps = ordered_gaps(torch.tensor([1.0, 4.0, 9.0]), torch.tensor([0.5, 0.1, 0.5]))

    assert sorted(gaps.tolist()) == [-3.0, 5.0]


def test_training_orders_texts_by_sentiment():
    model = random_model(LlamaForSequenceClassification, num_labels=1).float()
    rows = list(torch.randint(3, 50, (64, 12)))
    sentiments = torch.stack([(row < 20).float().mean() for row in rows])
    args = argparse.Namespace(lr=3e-3, batch_size=32, num_steps=40, seed=0)

    train_reward_model(model, rows, sentiments, args)

    assert pair_accuracy(model, rows, sentiments) > 0.9
    assert float(all_scores(model, rows).std()) == pytest.approx(1.5, rel=1e-4)


# Metrics


def test_distinct_share_counts_runs_of_three_tokens():
    assert distinct_share(trigrams([1, 2, 3, 1, 2, 3, 1])) == 3 / 5
    assert distinct_share(trigrams([1, 2])) == 1.0


# The command


def command(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["prepare_stories.py", *map(str, words)])
    main()


def test_a_folder_without_stories_is_refused_with_the_file(tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match=r"tinystories/stories.jsonl: no such file"):
        command(monkeypatch, "--verify", tmp_path)


@NEEDS_DATA
def test_the_sources_make_a_folder_that_holds_and_equals_the_ready_one(
    tmp_path, monkeypatch, capsys
):
    data = Path(os.environ["SPMDFLOW_DATA"])

    command(monkeypatch, "--from", data, "--out", tmp_path)

    told = capsys.readouterr().out
    assert "logits within" in told and "pair accuracy" in told
    for name in (TRAIN, TEST, f"{REWARD}/model.safetensors"):
        assert (tmp_path / name).read_bytes() == (data / name).read_bytes()
    made, ready = (
        LlamaForCausalLM.from_pretrained(folder / PADDED).state_dict()
        for folder in (tmp_path, data)
    )
    assert made.keys() == ready.keys()
    assert [name for name in made if not torch.equal(made[name], ready[name])] == []


@NEEDS_DATA
def test_prompts_that_overlap_are_found_in_a_ready_folder(tmp_path, monkeypatch):
    data = Path(os.environ["SPMDFLOW_DATA"])
    for name in ("models", "vader"):
        (tmp_path / name).symlink_to(data / name)
    (tmp_path / "tinystories").mkdir()
    for name in ("tinystories/stories.jsonl", TEST):
        (tmp_path / name).symlink_to(data / name)
    rows = (data / TRAIN).read_text().splitlines() + (data / TEST).read_text().splitlines()[:1]
    (tmp_path / TRAIN).write_text("\n".join(rows) + "\n")

    with pytest.raises(SystemExit, match=re.escape(json.loads(rows[-1])["prompt"])):
        command(monkeypatch, "--verify", tmp_path)
