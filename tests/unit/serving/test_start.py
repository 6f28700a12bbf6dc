"""The command line of `spmdflow serve`."""

from __future__ import annotations

import pytest

from spmdflow.serving.start import read_options


@pytest.mark.parametrize(
    "words",
    [
        ["folder", "--port", "81", "--key-file", "key", "--", "--seed", "3", "--", "x"],
        ["--port", "81", "--key-file", "key", "folder", "--", "--seed", "3", "--", "x"],
    ],
)
def test_words_behind_two_dashes_go_to_vllm_wherever_the_model_is_named(words: list[str]) -> None:
    options = read_options(words)

    assert (options.model, options.port, options.key_file) == ("folder", 81, "key")
    assert options.others == ("--seed", "3", "--", "x")


def test_unknown_word_before_the_dashes_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_options(["folder", "--no-key", "--seed", "3"])

    assert "unrecognized arguments: --seed 3" in capsys.readouterr().err
