"""All that is missing or wrong is told at once, and no setting ends in a traceback."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spmdflow import run
from spmdflow.config.check import check
from spmdflow.config.leaf import defaults, leaves
from spmdflow.config.load import load
from spmdflow.config.parallel import batch_algebra
from spmdflow.config.schema import PPOConfig
from spmdflow.errors import ConfigError
from tests.unit.config_folder import write_config_folder

KEYS = [leaf.key for leaf in leaves(defaults(PPOConfig))]
GROUPS = sorted({key.rpartition(".")[0] for key in KEYS} - {""})


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """ppo.py with a model and prompts that can work, in the current directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("together"))
        write_config_folder(Path())
        yield


def refused(words: list[str], capfd: pytest.CaptureFixture[str]) -> list[str]:
    """What the first start says, line by line."""
    assert run.main(["--inproc", *words]) == run.REFUSED
    return capfd.readouterr().err.splitlines()


def test_first_start_shows_all_that_is_missing_or_wrong(capfd: pytest.CaptureFixture[str]) -> None:
    Path("bare.py").write_text(Path("ppo.py").read_text())  # without a YAML beside it
    words = ["bare.py", "data.train_path=nowhere.jsonl", "actor.optimiser.lr=1", "run.seed=x"]
    words += ["actor.loss.clip_ratio=-1", "reward.function=nowhere.py:score", "eval_every=0"]

    lines = refused(words, capfd)

    assert lines[0] == "spmdflow: 6 errors in the settings:"
    heads = [line.split(". ", 1)[1] for line in lines if re.match(r" +\d+\. ", line)]
    starts = (
        "command line: unknown key actor.optimiser, nearest is actor.optimizer",
        "command line: run.seed got 'x' (str), expected int",
        "missing actor.model.path, expected a value for each",
        "actor.loss.clip_ratio: got -1.0, expected more than 0",
        "reward.function: no file nowhere.py in",
        "data.train_path: no file nowhere.jsonl in",
    )
    assert [head for head, start in zip(heads, starts, strict=True) if head.startswith(start)] == (
        heads
    )


def test_batch_sizes_of_all_roles_are_told_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    lines = refused(["ppo.py", "data.prompts_per_step=7"], capfd)

    heads = [line.split(". ", 1)[1] for line in lines[1:]]
    assert [head.partition(":")[0] for head in heads] == [
        "actor.update.mini_batch_size",
        "critic.update.mini_batch_size",
    ]


def test_one_error_looks_as_it_does_alone(capfd: pytest.CaptureFixture[str]) -> None:
    lines = refused(["ppo.py", "actor.model.path=actor", "data.train_path=nowhere.jsonl"], capfd)

    assert len(lines) == 1 and lines[0].startswith("spmdflow: data.train_path: no file nowhere")


ESCAPED = {
    b"run: {name: '\xff'}": r"bad\.yaml: got a byte that is not UTF-8 at position 13, expected",
    b"run: {name: '${}'}": r"bad\.yaml: run\.name got '\$\{\}', expected a value, \$\{key\}",
    b"run:\n  ? null\n  : 1\n": r"bad\.yaml: got None as a key under run, expected a name",
}


@pytest.mark.parametrize("content", ESCAPED)
def test_file_that_cannot_be_read_is_refused_with_the_key_and_the_remedy(content: bytes) -> None:
    Path("bad.yaml").write_bytes(content)

    with pytest.raises(ConfigError, match=ESCAPED[content]):
        load("ppo.py", "bad.yaml", [])


WORDS = {
    "critic.model.path=\udcff": r"got 'critic\.model\.path=\\udcff', expected text in UTF-8",
    "actor.optimizer.betas={}": r"actor\.optimizer\.betas got \{\} \(dict\), expected list",
    "run.trackers=${oc.decode:'1+1'}": r"^run\.trackers: got \$\{oc\.decode:'1\+1'\}, expected",
}


@pytest.mark.parametrize("word", WORDS)
def test_word_that_cannot_be_a_value_is_refused_with_the_key(word: str) -> None:
    with pytest.raises(ConfigError, match=WORDS[word]):
        load("ppo.py", None, ["actor.model.path=actor", "data.train_path=prompts.jsonl", word])


def test_own_role_that_is_trained_without_an_optimizer_is_refused() -> None:
    Path("own.py").write_text(
        "from dataclasses import dataclass, field\n"
        "from spmdflow.config.leaf import part\n"
        "from spmdflow.config.schema import *\n"
        "from spmdflow import PPOConfig\n"
        "@dataclass\n"
        "class Own:\n"
        "    model: ModelConfig = part(ModelConfig)\n"
        "    engine: EngineConfig = part(EngineConfig)\n"
        "    update: UpdateConfig = part(UpdateConfig)\n"
        "@dataclass\n"
        "class Config(PPOConfig):\n"
        "    own: Own = part(Own)\n"
        "def main(flow, cfg: Config): pass\n"
    )
    words = ["actor.model.path=actor", "own.model.path=actor", "data.train_path=prompts.jsonl"]

    cfg = load("own.py", None, words).cfg

    with pytest.raises(ConfigError, match=r"own: got update without optimizer in Own, expected"):
        check(cfg, 1)


@pytest.mark.parametrize("name", ["prompts", "responses", "completions", "solution_strs"])
def test_reward_function_that_takes_lists_is_refused_by_its_parameters(name: str) -> None:
    Path("lists.py").write_text(f"def batch({name}, second, rows):\n    return [1.0]\n")
    words = ["actor.model.path=actor", "data.train_path=prompts.jsonl"]

    cfg = load("ppo.py", None, [*words, "reward.function=lists.py:batch"]).cfg

    with pytest.raises(ConfigError, match=rf"whose {name} says that it takes lists, expected"):
        check(cfg, 1)


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(
        ["${}", "${a", "${oc.env:NO}", "${oc.decode:'1+1'}", "${run.seed}", "???", "~"]
    ),
    st.lists(st.one_of(st.integers(-2, 2), st.text(max_size=3)), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(-2, 2), max_size=2),
)
LIMITS = {"deadline": None, "suppress_health_check": list(HealthCheck)}


def _nested(changes: dict[str, object]) -> dict[str, object]:
    """{"a.b": 1} -> {"a": {"b": 1}}."""
    tree: dict[str, object] = {}
    for key, value in changes.items():
        *groups, name = key.split(".")
        part = tree
        for group in groups:
            part = part.setdefault(group, {}) if isinstance(part, dict) else {}
        if isinstance(part, dict):
            part[name] = value
    return tree


def allows_only_config_errors(path: str | None, words: list[str]) -> None:
    """Anything else that load or the checks raise fails the test."""
    with suppress(ConfigError):
        cfg = load("ppo.py", path, words).cfg
        check(cfg, 2)
        batch_algebra(cfg, 2)


@settings(max_examples=40, derandomize=True, **LIMITS)
@given(st.dictionaries(st.sampled_from([*KEYS, *GROUPS]), VALUES, min_size=1, max_size=3))
def test_mutated_words_end_in_config_errors_alone(changes: dict[str, object]) -> None:
    needed = ["actor.model.path=actor", "data.train_path=prompts.jsonl"]

    allows_only_config_errors(None, needed + [f"{key}={value}" for key, value in changes.items()])


@settings(max_examples=40, derandomize=True, **LIMITS)
@given(
    st.one_of(
        st.binary(max_size=60),
        st.dictionaries(st.sampled_from([*KEYS, "run", "actor"]), VALUES, max_size=3).map(
            lambda tree: yaml.safe_dump(_nested(tree), allow_unicode=True).encode(
                "utf-8", "surrogatepass"
            )
        ),
    )
)
def test_mutated_files_end_in_config_errors_alone(content: bytes) -> None:
    Path("mutated.yaml").write_bytes(content)

    allows_only_config_errors("mutated.yaml", [])
