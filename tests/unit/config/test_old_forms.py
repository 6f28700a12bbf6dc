"""Settings in their form of before 0.2.0 still work, with a warning that prints the new form."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmdflow.config.leaf import PARTS
from spmdflow.config.load import complete, load
from spmdflow.config.old_forms import translate_setting
from spmdflow.errors import ConfigError
from spmdflow.program import load_settings
from tests.unit.planned import ALGORITHMS

PPO = ALGORITHMS / "ppo.py"
FORMS = {
    "actor.engine.micro_batch=16 rows": "actor.engine.micro_batch_rows=16",
    "critic.engine.micro_batch=4096 tokens": "critic.engine.micro_batch_tokens=4096",
    "actor.engine.residency=keep": "actor.engine.offload=[]",
    "actor.engine.residency=auto": "actor.engine.offload=null",
    "actor.engine.residency=offload": "actor.engine.offload=[parameters,gradients,optimizer]",
    "actor.engine.residency=optimizer": "actor.engine.offload=[optimizer]",
    "actor.rollout.kv_cache=20 GiB": "actor.rollout.kv_cache_gib=20.0",
    "actor.rollout.kv_cache=67108864": None,
    "actor.rollout.kv_cache=0.6 of free": "actor.rollout.kv_cache_gib=null "
    "actor.rollout.kv_cache_fraction=0.6",
    "data.eval_prompts=all": "data.eval_prompts=null data.eval_samples=0",
    "data.eval_prompts=512 x 8 samples": "data.eval_prompts=512 data.eval_samples=8",
    "run.profile_steps=3-4 on 0, 2": "run.profile_steps=[3,4] run.profile_ranks=[0,2]",
    "run.profile_steps='3'": "run.profile_steps=[3]",
    "run.call_seconds=auto": "run.call_seconds=null",
    "reward.on_error=drop 25%": "reward.on_error=drop reward.max_failed_fraction=0.25",
}


@pytest.mark.parametrize(("old", "new"), FORMS.items())
def test_old_form_warns_with_words_that_give_the_same_settings(old: str, new: str | None) -> None:
    loaded = load(PPO, None, [old])

    (warning,) = loaded.warnings
    printed = warning.partition("; write ")[2]
    assert warning.startswith("warning: command line: ") and "0.3.0" in warning
    assert new is None or printed == new
    again = load(PPO, None, printed.split(" "))
    assert again.cfg == loaded.cfg and again.warnings == ()


def test_old_form_in_a_file_is_named_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("actor:\n  engine: {micro_batch: 4096 tokens}\nrun: {profile_steps: null}\n")

    loaded = load(PPO, path, [])

    assert loaded.cfg.actor.engine.max_micro_batch_tokens == 4096
    assert loaded.cfg.run.profile_steps == []
    first, second = loaded.warnings
    assert first == (
        f"warning: {path}: actor.engine.micro_batch=4096 tokens is the form of before 0.2.0 and "
        "goes with 0.3.0; write actor.engine.micro_batch_tokens=4096"
    )
    assert second.endswith("write run.profile_steps=[]")


def test_program_that_loads_old_settings_is_warned(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "spmdflow"):
        load_settings(PPO, None, ["actor.engine.residency=keep"])

    assert "write actor.engine.offload=[]" in caplog.text


def test_old_attribute_that_a_program_sets_is_translated_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cfg = load(PPO, None, []).cfg
    cfg.actor.engine.micro_batch = "3 rows"
    cfg.data.eval_prompts = "8 x 2 samples"

    with caplog.at_level(logging.WARNING, "spmdflow"):
        completed = complete(cfg)

    assert completed.actor.engine.micro_batch_rows == 3
    assert (completed.data.eval_prompts, completed.data.eval_samples) == (8, 2)
    assert "write actor.engine.micro_batch_rows=3" in caplog.text


@pytest.mark.parametrize(
    "word",
    [
        "actor.engine.micro_batch=many",
        "actor.engine.residency=moments",
        "actor.engine.residency=optimizer, optimizer",
        "actor.rollout.kv_cache=1.2 of free",
        "actor.rollout.kv_cache=20 Gib",
        "data.eval_prompts=8 samples",
        "run.profile_steps=5-3",
    ],
)
def test_old_form_that_cannot_be_read_is_refused_with_the_new_setting(word: str) -> None:
    key, _, value = word.partition("=")

    with pytest.raises(ConfigError, match=rf"{key}: got '{value}', .*set ") as caught:
        load(PPO, None, [word])

    assert load(PPO, None, [str(caught.value).rpartition("set ")[2].split(" ")[0].strip(",")])


def test_reference_to_an_old_setting_is_one_to_the_new_ones() -> None:
    words = [
        "actor.engine.micro_batch=7 rows",
        "critic.engine.micro_batch=${actor.engine.micro_batch}",
    ]

    cfg = load(PPO, None, words).cfg

    assert cfg.critic.engine.micro_batch_rows == 7
    assert cfg.critic.engine.micro_batch_tokens == 8192


@given(st.lists(st.sampled_from(PARTS), unique=True, min_size=1), st.sampled_from([",", ", "]))
def test_parts_are_read_in_any_order(parts: list[str], comma: str) -> None:
    known = ["actor.engine.offload"]

    translation = translate_setting("actor.engine.residency", comma.join(parts), known)

    assert translation == {known[0]: [part for part in PARTS if part in parts]}


@pytest.mark.parametrize(
    ("words", "rows", "tokens"),
    [
        ([], 256, None),  # of ppo.yaml
        (["actor.engine.micro_batch_tokens=4096"], None, 4096),
        (["actor.engine.micro_batch_rows=5"], 5, None),
        (["actor.engine.micro_batch_rows=5", "actor.engine.micro_batch_tokens=64"], None, 64),
        (["actor.engine.micro_batch_tokens=64", "actor.engine.micro_batch_rows=5"], 5, None),
    ],
)
def test_limit_of_a_micro_batch_that_is_given_last_counts(
    words: list[str], rows: int | None, tokens: int | None
) -> None:
    engine = load(PPO, None, words).cfg.actor.engine

    assert engine.micro_batch_rows == rows and engine.max_micro_batch_tokens == tokens


def test_fraction_that_is_given_after_a_size_counts() -> None:
    size = "actor.rollout.kv_cache_gib=20"
    fraction = "actor.rollout.kv_cache_fraction=0.5"

    def cache_of(*words: str) -> tuple[Any, Any]:
        rollout = load(PPO, None, words).cfg.actor.rollout
        return rollout.kv_cache_gib, rollout.kv_cache_fraction

    assert cache_of(size, fraction) == (None, 0.5)
    assert cache_of(fraction, size) == (20.0, 0.5)  # the size wins over the fraction
