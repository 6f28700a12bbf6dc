"""What is chosen for a device whose memory a run does not fit into, and what the user reads."""

from __future__ import annotations

from dataclasses import replace

from spmdflow.config.load import load
from spmdflow.mapping.hardware import load_hardware
from spmdflow.plan.fit import find_fit


def reasons(memory_bytes: float) -> str:
    """Why parts of GRPO on one such device stay there or leave it."""
    loaded = load("grpo", None, ["actor.rollout.engine=builtin"])
    hardware = replace(
        load_hardware("h100"), memory_bytes=memory_bytes, reserved_bytes=0, usable_memory_fraction=1
    )
    choices = find_fit(loaded.script, loaded.cfg, 1, hardware)
    return "\n".join(choice.why for choice in choices if choice.key.endswith("offload"))


def test_run_that_does_not_fit_is_told_what_to_set() -> None:
    text = reasons(1e6)

    assert "which does not fit" in text
    for remedy in ("engine.micro_batch_tokens", "engine.options=[recompute]", "more ranks"):
        assert remedy in text


def test_run_that_fits_is_told_no_remedy() -> None:
    text = reasons(80e9)

    assert "GB" in text and "does not fit" not in text
