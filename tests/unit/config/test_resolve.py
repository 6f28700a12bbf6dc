"""The passes over a run's settings: each returns new settings and reasons, and changes nothing."""

from __future__ import annotations

import copy
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from spmdflow.config.check import check_open
from spmdflow.config.load import load
from spmdflow.config.location import to_yaml
from spmdflow.config.resolve import (
    PASSES,
    Choice,
    PreviousRun,
    Settings,
    check,
    choices_text,
    device_defaults,
    memory,
    placement,
    resolve,
    resume,
    template_date,
)
from spmdflow.errors import ConfigError
from tests.unit.config_folder import write_config_folder
from tests.unit.planned import ALGORITHMS

PPO = ALGORITHMS / "ppo.py"
POOLS = {"all": {"roles": ["actor", "critic", "reference", "reward"], "ranks": [0, 1]}}
FOUND = [Choice("placement", POOLS, "it is fast"), Choice("critic.engine.layout", "t2", "it fits")]
MEGATRON = ("placement=auto", "critic.engine.kind=megatron")
FITTED = [Choice("actor.engine.offload", ["optimizer"], "it fits")]


def settings_of(*words: str, device: str = "cpu", previous: PreviousRun | None = None) -> Settings:
    """Settings of PPO on two ranks, and a planner that always answers the same."""
    loaded = load(PPO, None, words)
    return Settings(
        cfg=loaded.cfg,
        script=loaded.script,
        world_size=2,
        node_size=2,
        device=device,
        search_placement=lambda _: FOUND,
        fit_memory=lambda _: FITTED,
        previous=previous,
        written=loaded.cfg,
    )


def test_passes_are_applied_in_this_order() -> None:
    assert PASSES == (device_defaults, resume, template_date, placement, memory, check)


@pytest.mark.parametrize(
    ("apply", "device", "key", "value"),
    [
        (device_defaults, "cuda", "actor.model.dtype", "bfloat16"),
        (resume, "cpu", "critic.model.dtype", "bfloat16"),
        (placement, "cpu", "critic.engine.layout", "t2"),
        (memory, "cuda", "actor.engine.offload", ["optimizer"]),
    ],
)
def test_pass_returns_new_settings_with_its_reasons_and_leaves_the_old_ones(
    apply: Any, device: str, key: str, value: object
) -> None:
    previous = PreviousRun({"critic": {"model": {"dtype": "bfloat16"}}}, num_ranks=4)
    settings = settings_of("placement=auto", device=device, previous=previous)
    before = copy.deepcopy(settings.cfg)

    after, reasons = apply(settings)

    section, _, name = key.rpartition(".")
    group, _, part = section.partition(".")
    assert getattr(getattr(getattr(after.cfg, group), part), name) == value
    assert key in {choice.key for choice in reasons} and all(choice.why for choice in reasons)
    assert settings.cfg == before and after.cfg != before


def test_check_is_a_pass_that_changes_nothing_and_refuses_what_cannot_work() -> None:
    settings = settings_of()

    assert check(settings) == (settings, [])
    with pytest.raises(ConfigError, match=r"split got 1 rank, expected at least 2"):
        check(replace(settings_of("placement=split"), world_size=1))


def test_planner_is_not_asked_where_nothing_is_left_open() -> None:
    settings = settings_of("actor.rollout.engine=builtin")
    settings, _ = device_defaults(settings)

    assert placement(settings) == (settings, []) and memory(settings) == (settings, [])


def test_date_of_a_template_that_asks_for_it_is_that_of_the_first_start(tmp_path: Path) -> None:
    template = tmp_path / "chat_template.jinja"
    template.write_text("{{ strftime_now('%d %b %Y') }}")
    previous = PreviousRun({"data": {"chat_template_date": "2024-02-29"}}, num_ranks=2)

    def resolved(*words: str, previous: PreviousRun | None = None) -> Any:
        settings = settings_of(f"data.tokenizer_path={tmp_path}", *words, previous=previous)
        return template_date(settings)[0].cfg

    before = datetime.now(UTC).date().isoformat()
    first = resolved()
    after = datetime.now(UTC).date().isoformat()
    resumed = resolved(previous=previous)
    written = resolved("data.chat_template_date=2024-03-01", previous=previous)
    template.write_text("no date")

    assert before <= first.data.chat_template_date <= after
    assert first.actor.rollout.chat_template_date == first.data.chat_template_date
    assert resumed.data.chat_template_date == "2024-02-29"
    assert resumed.actor.rollout.chat_template_date == "2024-02-29"
    assert written.data.chat_template_date == "2024-03-01"
    assert resolved().data.chat_template_date == "auto"


def test_later_reason_for_a_setting_replaces_the_earlier_one() -> None:
    previous = PreviousRun({"actor": {"model": {"dtype": "bfloat16"}}}, num_ranks=2)

    settings, reasons = resolve(settings_of(*MEGATRON, previous=previous))

    values = [choice.value for choice in reasons if choice.key == "actor.model.dtype"]
    assert values == ["bfloat16"] == [settings.cfg.actor.model.dtype]
    assert settings.cfg.placement == POOLS


def test_pools_and_layouts_of_the_resumed_run_are_kept_without_a_search() -> None:
    first, _ = resolve(settings_of(*MEGATRON))
    first.cfg.actor.engine.options = ["recompute"]
    previous = PreviousRun(yaml.safe_load(to_yaml(first.cfg)), num_ranks=2)

    settings, reasons = resolve(settings_of(*MEGATRON, previous=previous))

    assert to_yaml(settings.cfg) == to_yaml(first.cfg)
    assert {choice.why for choice in reasons if choice.key == "placement"} == {
        "the checkpoint's run had it"
    }


def test_text_has_the_values_first_and_then_their_common_reason() -> None:
    choices = [
        Choice("actor.model.dtype", "float32", "the device is cpu"),
        Choice("critic.model.dtype", "float32", "the device is cpu"),
        Choice("actor.rollout.engine", "builtin", "the device is cpu"),
        Choice("placement", POOLS, "it is fast"),
    ]

    assert choices_text(choices) == (
        "auto   dtype: float32 (actor.model, critic.model), engine: builtin (actor.rollout), "
        "because the device is cpu\n"
        "auto   placement: {actor, critic, reference, reward}@2, because it is fast"
    )


def test_open_settings_are_checked_for_what_is_wrong_whatever_auto_becomes() -> None:
    words = ["placement=auto", "actor.rollout.layout=t2", "actor.engine.options=[moments]"]
    cfg = load(PPO, None, words).cfg

    with pytest.raises(ConfigError, match=r"actor\.engine\.options: got 'moments'") as caught:
        check_open(cfg, 2)

    assert "rollout.layout" not in str(caught.value)  # it depends on rollout.engine=auto
    assert "placement" not in str(caught.value)


@pytest.mark.parametrize(
    "word", ["placement=split", "placement=auto actor.model.path=/nowhere", "actor.loss.kl_coef=-1"]
)
def test_errors_are_found_before_torch_is_loaded(word: str, tmp_path: Path) -> None:
    write_config_folder(tmp_path)
    program = (
        "import sys\n"
        "from spmdflow.config.load import load\n"
        "from spmdflow.errors import ConfigError\n"
        "from spmdflow.program import prepare\n"
        "try:\n"
        f"    prepare(load('ppo.py', None, {word.split()!r}), 1)\n"
        "except ConfigError:\n"
        "    print('torch' in sys.modules)\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )

    assert done.stdout == "False\n", done.stderr
