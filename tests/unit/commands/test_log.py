"""What reaches the log of a run."""

from __future__ import annotations

import logging
import warnings

import pytest

from spmdflow.log import quiet_libraries


def test_warnings_of_libraries_are_left_out_and_others_are_kept() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        quiet_libraries()
        for module in ("megatron.core.optimizer", "vllm.entrypoints", "my_script"):
            warnings.warn_explicit("set this", UserWarning, "file.py", 1, module=module)
        warnings.warn_explicit("wrong", RuntimeWarning, "file.py", 1, module="megatron.core")

    assert [str(warning.message) for warning in seen] == ["set this", "wrong"]


@pytest.mark.parametrize("name", ["torch.fx._symbolic_trace", "torch._library.triton"])
def test_chatty_loggers_still_report_errors(name: str) -> None:
    quiet_libraries()

    assert not logging.getLogger(name).isEnabledFor(logging.WARNING)
    assert logging.getLogger(name).isEnabledFor(logging.ERROR)
