"""Data settings that are accepted, and refusals that need more than PPO's settings."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from spmdflow.config.check import check
from spmdflow.config.load import load
from spmdflow.errors import ConfigError
from tests.unit.config_folder import accept, write_config_folder

ALGOS = Path(__file__).parents[3] / "algos"


@pytest.mark.parametrize("ending", [".jsonl.gz", ".jsonl.zst", ".parquet"])
def test_packed_files_are_accepted(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write_config_folder(tmp_path))
    (tmp_path / f"packed{ending}").write_bytes(gzip.compress(b'{"prompt": "ab"}\n'))

    assert accept(f"data.train_path=packed{ending}").data.train_path == f"packed{ending}"


def test_numbers_of_an_evaluation_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write_config_folder(tmp_path))

    data = accept("data.eval_prompts=16", "data.eval_samples=4").data

    assert (data.eval_prompts, data.eval_samples) == (16, 4)
    assert accept().data.eval_prompts is None


def test_reward_model_alone_cannot_say_what_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write_config_folder(tmp_path))
    model = ("reward.function=null", "reward.model.path=scorer")
    accept(*model)

    with pytest.raises(ConfigError) as caught:
        accept(*model, "data.eval_samples=2")

    assert str(caught.value) == (
        "data.eval_samples: got 2 with a reward model alone, expected a function that says what is "
        "right, for pass@k; set data.eval_samples=0, or reward.function"
    )


@pytest.mark.parametrize(
    ("script", "overrides", "message"),
    [
        (
            "safe_rlhf",
            ("pretrain.prompts_per_step=512",),
            "pretrain.prompts_per_step: got 512, expected 1024, one text for each sample of a step "
            "(1024 prompts x 1); set pretrain.prompts_per_step=1024",
        ),
        (
            "sft",
            (
                "data.eval_prompts=16",
                "data.eval_samples=4",
            ),
            "data.eval_samples: got 4 for examples, which have their answers already, expected 0; "
            "set data.eval_samples=0",
        ),
    ],
)
def test_data_settings_that_do_not_fit_the_algorithm_are_refused(
    script: str, overrides: tuple[str, ...], message: str
) -> None:
    cfg = load(ALGOS / f"{script}.py", None, overrides).cfg

    with pytest.raises(ConfigError) as caught:
        check(cfg, 1)

    assert str(caught.value) == message
