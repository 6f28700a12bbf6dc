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


def test_number_of_eval_prompts_is_read_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write_config_folder(tmp_path))

    assert accept("data.eval_prompts=16").data.eval_prompts == "16"
    assert accept("data.eval_prompts=16 x 4 samples").data.eval_prompts == "16 x 4 samples"


def test_reward_model_alone_cannot_say_what_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write_config_folder(tmp_path))
    model = ("reward.function=null", "reward.model.path=scorer")
    accept(*model)

    with pytest.raises(ConfigError) as caught:
        accept(*model, "data.eval_prompts=all x 2 samples")

    assert str(caught.value) == (
        "data.eval_prompts: got 'all x 2 samples' with a reward model alone, expected a function "
        "that says what is right, for pass@k; write all or a number, or set reward.function"
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
            ("data.eval_prompts=16 x 4 samples",),
            "data.eval_prompts: got '16 x 4 samples' for examples, which bring their answers "
            "along, expected no samples; write all or a number",
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
