"""Settings that work: precedence, types, paths, references, help and the first lines of a run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from spmdflow.config.check import check
from spmdflow.config.leaf import defaults, flat, leaves, schema_help
from spmdflow.config.load import complete, help_text, load, settings_text
from spmdflow.config.location import to_yaml
from spmdflow.config.offline import DPOConfig
from spmdflow.config.parallel import batch_algebra
from spmdflow.config.schema import PPOConfig
from spmdflow.config.script import SCRIPT_MODULE
from spmdflow.errors import ConfigError
from tests.unit.config_folder import accept, write_config_folder

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_config_folder(tmp_path)
    monkeypatch.chdir(tmp_path)


def test_command_line_wins_over_yaml_and_yaml_over_defaults() -> None:
    Path("own.yaml").write_text(
        Path("ppo.yaml").read_text() + "run: {seed: 5, name: from-yaml}\ntotal_steps: 7\n"
    )

    cfg = load("ppo.py", "own.yaml", ["run.seed=9"]).cfg

    assert (cfg.run.seed, cfg.run.name, cfg.total_steps) == (9, "from-yaml", 7)
    assert cfg.run.resume == "auto"


def test_file_of_ones_own_lies_over_the_scripts_own_file() -> None:
    alone = load("ppo.py", None, [])
    Path("mine.yaml").write_text("actor: {optimizer: {lr: 0.5}}\nsave_every: 3\n")

    mine = load("ppo.py", "mine.yaml", ["save_every=4"])

    changed = dict(differences(to_yaml(alone.cfg), to_yaml(mine.cfg)))
    assert changed == {"actor.optimizer.lr": "0.5", "save_every": "4"}


def differences(before: str, after: str) -> Iterator[tuple[str, str]]:
    old = flat(yaml.safe_load(before))
    new = flat(yaml.safe_load(after))
    for key in old | new:
        if old.get(key) != new.get(key):
            yield key, str(new.get(key))


def test_map_of_a_file_of_ones_own_replaces_the_map_of_the_scripts_own_file() -> None:
    settings = yaml.safe_load(Path("ppo.yaml").read_text())
    settings["reward"]["function"] = {"a": "reward.py:score"}
    Path("ppo.yaml").write_text(yaml.safe_dump(settings))
    Path("mine.yaml").write_text("reward: {function: {b: reward.py:score}}\n")

    cfg = load("ppo.py", "mine.yaml", []).cfg

    assert list(cfg.reward.function) == ["b"]


def test_three_question_marks_in_a_file_make_a_setting_required_again() -> None:
    Path("mine.yaml").write_text("actor:\n  model:\n    path: ???\n")

    with pytest.raises(ConfigError, match=r"missing actor\.model\.path"):
        load("ppo.py", "mine.yaml", [])


def test_first_lines_name_the_settings_that_files_and_words_changed() -> None:
    Path("mine.yaml").write_text("actor: {optimizer: {lr: 0.5}}\n")

    text = settings_text(load("ppo.py", "mine.yaml", ["total_steps=7", "run.seed=0"]))

    assert "ppo.yaml, then mine.yaml, then command line:" in text
    assert "optimizer.lr=0.5" in text and "total_steps 7" in text
    assert "seed" not in text, "0 is its default"


def test_help_shows_the_values_that_the_command_line_would_run_with() -> None:
    Path("mine.yaml").write_text("actor: {loss: {kl_coef: 0.25}}\n")

    text = help_text("ppo.py", "mine.yaml", ["save_every=11"])

    assert "actor.loss.kl_coef (float, default 0.0; here 0.25 by mine.yaml)" in text
    assert "save_every (int, default 0; here 11 by command line)" in text
    assert "actor.model.path (str, required; here " in text


def test_help_and_first_lines_show_a_map_with_all_that_files_and_words_put_into_it() -> None:
    Path("mine.yaml").write_text("reward: {function: {right: reward.py:score}}\n")
    words = [
        "reward.function.twice=2 * reward.py:score",
        "reward.function.half=0.5 * reward.py:score",
    ]
    whole = {
        "right": "reward.py:score",
        "twice": "2 * reward.py:score",
        "half": "0.5 * reward.py:score",
    }

    loaded = load("ppo.py", "mine.yaml", words)

    assert f"here {whole} by command line)" in help_text("ppo.py", "mine.yaml", words)
    assert loaded.changed["reward.function"] == (whole, "command line")
    assert loaded.cfg.reward.function == whole


def test_help_shows_a_setting_of_the_script_that_has_the_name_of_the_examples() -> None:
    Path("own.py").write_text(
        "from dataclasses import dataclass\n"
        "from spmdflow.config.leaf import setting\n"
        "@dataclass\n"
        "class Settings:\n"
        "    assume: str = setting('What is assumed.', 'nothing')\n"
        "def main(flow, cfg: Settings): pass\n"
    )

    text = help_text("own.py", None, ["assume=much"])

    assert "assume (str, default nothing; here much by command line)" in text


@pytest.mark.parametrize("key", ["reward.function", "data.train_path"])
def test_entry_of_a_setting_that_is_one_text_is_refused_and_does_not_replace_it(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load("ppo.py", None, [f"{key}.more=other"])

    now = {"reward.function": "reward.py:score", "data.train_path": "train.jsonl"}[key]
    assert f"command line: {key}.more is an entry of a map, but {key} is '" in str(caught.value)
    assert f"{now}'; write the whole map, as in {key}={{NAME: " in str(caught.value)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ({"a": "???"}, r"^reward\.function: got \{'a': '\?\?\?'\}, expected a value instead"),
        ({"a": object()}, r"^settings: reward\.function got \{'a': <object"),
    ],
)
def test_map_of_settings_made_in_python_is_refused_by_its_key(function: object, said: str) -> None:
    cfg = load("ppo.py", None, []).cfg
    cfg.reward.function = function

    with pytest.raises(ConfigError, match=said):
        complete(cfg)


@pytest.mark.parametrize("digits", [4301, 20_000])
def test_number_that_is_too_long_to_read_is_refused_with_its_place(digits: int) -> None:
    Path("mine.yaml").write_text(f"total_steps: {'1' * digits}\n")

    with pytest.raises(ConfigError, match=r"mine\.yaml: got a number \(Exceeds the limit"):
        load("ppo.py", "mine.yaml", [])
    with pytest.raises(ConfigError, match="command line: run.seed: got a number"):
        load("ppo.py", None, [f"run.seed={'1' * digits}"])


def test_later_override_wins_over_earlier() -> None:
    assert accept("run.seed=1", "run.seed=2").run.seed == 2


def test_values_get_the_declared_types() -> None:
    cfg = accept(
        "actor.optimizer.lr=1e-4",
        "actor.optimizer.betas=[0.8,0.9]",
        "run.trackers=[]",
        "critic.loss.clip_range=null",
        "run.name=a=b",
        "reward.sample_seconds=3",
    )

    assert isinstance(cfg, PPOConfig)
    assert cfg.actor.optimizer.lr == 1e-4
    assert cfg.actor.optimizer.betas == [0.8, 0.9]
    assert cfg.critic.loss.clip_range is None
    assert cfg.run.name == "a=b"
    assert type(cfg.reward.sample_seconds) is float


def test_models_that_are_not_named_start_from_the_actor() -> None:
    cfg = accept()

    assert cfg.data.tokenizer_path == cfg.reference.model.path == cfg.actor.model.path
    assert cfg.critic.model.path == cfg.actor.model.path
    assert cfg.reward.model is None


def test_critic_starts_from_the_reward_model_if_there_is_one() -> None:
    cfg = accept("reward.model.path=scorer", "reward.function=null")

    assert cfg.critic.model.path == "scorer"


def test_reference_to_the_environment_is_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPMDFLOW_SOMEWHERE", "scorer")

    assert accept("critic.model.path=${oc.env:SPMDFLOW_SOMEWHERE}").critic.model.path == "scorer"


def test_resolved_yaml_loads_to_equal_settings() -> None:
    loaded = load("ppo.py", None, ["placement={a: {roles: [actor], ranks: [0, 1]}}"])
    Path("again.yaml").write_text(to_yaml(loaded.cfg))

    again = load("ppo.py", "again.yaml", [])

    assert again.cfg == loaded.cfg
    assert to_yaml(again.cfg) == to_yaml(loaded.cfg)


def test_path_that_is_only_beside_the_yaml_is_found_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")

    cfg = load("../ppo.py", None, []).cfg

    assert cfg.data.train_path == "../train.jsonl"
    assert cfg.actor.model.path == "../actor"
    assert cfg.reward.function == "../reward.py:score"
    check(cfg, 1)


def test_path_in_the_current_directory_wins_over_the_one_beside_the_yaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    Path("train.jsonl").write_text('{"prompt": "b"}\n')

    assert load("../ppo.py", None, []).cfg.data.train_path == "train.jsonl"


def test_script_is_imported_under_one_name_with_its_own_config_class() -> None:
    Path("own.py").write_text(
        "from dataclasses import dataclass\n"
        "from spmdflow.config.schema import PPOConfig, setting\n\n\n"
        "@dataclass\n"
        "class Config(PPOConfig):\n"
        "    tau: float = setting('Expectile.', 0.7, above=0)\n\n\n"
        "def main(flow, cfg: Config):\n"
        "    pass\n"
    )

    loaded = load("own.py", "ppo.yaml", ["tau=0.9"])

    assert sys.modules[SCRIPT_MODULE] is loaded.script
    assert type(loaded.cfg) is loaded.script.Config
    assert loaded.script.main.__module__ == SCRIPT_MODULE
    assert loaded.cfg.tau == 0.9
    check(loaded.cfg, 1)


def test_frozen_models_have_no_settings_of_the_backward_pass() -> None:
    keys = [leaf.key for leaf in leaves(defaults(PPOConfig))]

    assert "actor.engine.options" in keys
    assert "reference.engine.options" not in keys
    assert accept().reference.engine.recompute is False


def test_frozen_models_are_padded_where_the_actor_is() -> None:
    cfg = accept("actor.engine.options=[padded,recompute]")

    assert [cfg.reference.engine.options, cfg.reward.engine.options] == [["padded"], ["padded"]]
    assert cfg.critic.engine.options == accept().reference.engine.options == []


def test_help_writes_a_default_with_line_breaks_in_one_line() -> None:
    entry = r'data.prompt_end (str, default "\n\nAssistant:")'

    assert entry in schema_help(DPOConfig).splitlines()


def test_help_names_key_type_default_and_sentence_of_every_setting() -> None:
    text = schema_help(PPOConfig)

    assert "data.train_path (str or map of name -> str, required)\n    File or data set of" in text
    assert (
        "actor.optimizer.betas (list of float, default [0.9, 0.95])\n"
        "    AdamW's two moment decays. (at least 0, less than 1)"
    ) in text
    assert "run.dir (str or none, default null)\n    RUN_DIR itself; overrides name." in text
    assert "run.resume (one of auto, never, reload_frozen, afresh, default auto)\n" in text
    assert "(parameters | gradients | optimizer)" in text  # a list, each item one of them
    assert "reward.model.path (str, required)" in text
    assert text.count("\n    ") == len(list(leaves(defaults(PPOConfig))))


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("actor.optimizer.lr", "float"),
        ("actor.engine.micro_batch_rows", "int or none"),
        ("actor.optimizer.decay_parameters", "one of all, matrices"),
        ("actor.engine.offload", "list of str or none"),
        ("reference.shares", "actor or none"),
        ("data.chat_template_arguments", "map of name -> value"),
        ("reward.function", "str, map of name -> str, or none"),
        ("placement", "str or map of pool -> {roles, ranks}"),
    ],
)
def test_help_gives_the_type_that_a_user_writes(key: str, words: str) -> None:
    types = {leaf.key: leaf.type_text for leaf in leaves(defaults(PPOConfig))}

    assert types[key] == words


def test_bundled_ppo_settings_pass_the_check_on_every_small_world() -> None:
    cfg = load("ppo.py", REPOSITORY / "algos/ppo.yaml", []).cfg

    for world_size in range(1, 9):
        check(cfg, world_size)


def test_batch_algebra_names_pools_and_every_stage_of_the_batch() -> None:
    cfg = accept(
        "placement={a: {roles: [actor, reference], ranks: [0, 1, 2]}, "
        "b: {roles: [critic, reward], ranks: [4]}}",
        "data.samples_per_prompt=2",
        "actor.update.num_epochs=3",
        "actor.engine.micro_batch_rows=16",
        "critic.engine.micro_batch_tokens=100",
        "critic.update.mini_batch_size=128",
        world_size=5,
    )

    assert batch_algebra(cfg, 5).splitlines() == [
        "pool   a: ranks 0-2: actor, reference",
        "pool   b: ranks 4: critic, reward",
        "pool   none: ranks 3 have no work",
        "batch  64 prompts x 2 samples = 128 rows",
        "actor  128 rows = 2 mini-batches of 64, x 3 epochs = 6 optimizer steps (600 in the run)",
        "       64 rows over 3 ranks = 21 or 22 per rank = 2 micro-batches of at most 16 rows",
        "critic 128 rows = 1 mini-batch of 128, x 1 epoch = 1 optimizer step (100 in the run)",
        "       128 rows over 1 rank = 128 per rank = micro-batches of at most 100 tokens",
    ]


def test_warm_up_longer_than_a_short_run_is_said_and_not_refused() -> None:
    cfg = accept("actor.optimizer.warmup_steps=500")

    assert "(100 in the run, all of them warm-up, which takes 500)" in batch_algebra(cfg, 1)
