"""docs/COMING_FROM.md: its settings exist, and unknown keys are answered with them."""

from __future__ import annotations

from functools import cache

import pytest

from spmdflow.config.algorithm import DAPOConfig, GRPOConfig, RLOOConfig
from spmdflow.config.foreign_names import FOREIGN_NAMES, setting_for
from spmdflow.config.leaf import defaults, leaves
from spmdflow.config.load import load
from spmdflow.config.offline import DPOConfig, RewardModelRunConfig, SFTConfig
from spmdflow.config.schema import PPOConfig
from spmdflow.errors import ConfigError
from tests.algos.runs import ROOT
from tests.unit.pages.coming_from import PAGE, written_page

SCHEMAS = (PPOConfig, GRPOConfig, DAPOConfig, RLOOConfig, DPOConfig, SFTConfig)


@cache
def settings_of(schema: type) -> set[str]:
    return {leaf.key for leaf in leaves(defaults(schema))}


def test_tables_are_the_names_that_are_known() -> None:
    text = PAGE.read_text(encoding="utf-8")

    assert written_page(text) == text, ".venv/bin/python -m tests.unit.pages.coming_from"


@pytest.mark.parametrize("foreign", FOREIGN_NAMES, ids=lambda foreign: foreign.name)
def test_every_name_leads_to_a_setting_that_a_script_has(foreign) -> None:
    known = set().union(*map(settings_of, SCHEMAS))

    assert set(foreign.settings) <= known | settings_of(RewardModelRunConfig)
    assert setting_for(foreign.name, known) == foreign.settings[0]


@pytest.mark.parametrize(
    ("script", "key", "setting"),
    [
        ("grpo", "learning_rate", "actor.optimizer.lr"),
        ("grpo", "actor.optimizer.learning_rate", "actor.optimizer.lr"),
        ("ppo", "critic.optimizer.learning_rate", "critic.optimizer.lr"),
        ("grpo", "num_generations", "data.samples_per_prompt"),
        ("grpo", "beta", "actor.loss.kl_coef"),
        ("dpo", "beta", "actor.loss.beta"),
        ("grpo", "actor_rollout_ref.rollout.n", "data.samples_per_prompt"),
        ("grpo", "actor_rollout_ref.actor.ppo_mini_batch_size", "actor.update.mini_batch_size"),
        ("reward_model", "learning_rate", "reward_model.optimizer.lr"),
        ("ppo", "init_kl_coef", "advantage.kl_coef"),
        ("ppo", "epochs", "actor.update.num_epochs"),
    ],
)
def test_unknown_key_of_another_library_is_answered_with_ours(
    script: str, key: str, setting: str
) -> None:
    path = ROOT / "algos" / f"{script}.py"

    with pytest.raises(ConfigError, match=rf"unknown key {key}, which is {setting} here;"):
        load(path, None, [f"{key}=1"])


def test_no_setting_of_ours_is_taken_for_one_of_theirs() -> None:
    for schema in SCHEMAS:
        for key in settings_of(schema):
            typo = key + "s"
            assert setting_for(typo, settings_of(schema)) is None, typo
