"""engine.options that the plan adds where there is memory for them."""

from __future__ import annotations

from dataclasses import replace

from spmdflow.config.load import Loaded, load
from spmdflow.config.resolve import choose_device_defaults
from spmdflow.mapping.hardware import Hardware, load_hardware
from spmdflow.plan.fit import find_fit
from tests.unit.planned import ALGORITHMS, SMALL


def chosen(
    hardware: Hardware, num_ranks: int, *words: str, device: str = "cuda"
) -> tuple[Loaded, dict[str, str]]:
    """The settings with what was chosen, and the choices of options with their reasons."""
    loaded = load(ALGORITHMS / "ppo.py", None, [*SMALL, *words])
    for choice in choose_device_defaults(loaded.cfg, device, here=False):
        choice.set_in(loaded.cfg)
    choices = find_fit(loaded.script, loaded.cfg, num_ranks, hardware)
    for choice in choices:
        choice.set_in(loaded.cfg)
    return loaded, {c.key: c.why for c in choices if c.key.endswith(".options")}


def test_gradients_are_reduced_once_a_step_where_memory_allows() -> None:
    loaded, why = chosen(load_hardware("h100"), 2)

    cfg = loaded.cfg
    assert cfg.actor.engine.options == cfg.critic.engine.options == ["keep_gathered"]
    assert all("GB with it" in text for text in why.values()) and len(why) == 2


def test_no_memory_no_wish_and_nothing_to_reduce_leave_the_options_alone() -> None:
    h100 = load_hardware("h100")
    tiny = replace(h100, memory_bytes=1e6, reserved_bytes=0.0)
    exact = ("actor.model.dtype=float32", "critic.model.dtype=float32")

    assert chosen(tiny, 2)[1] == {}
    assert chosen(h100, 1, *exact)[1] == {}  # plain modules
    assert chosen(h100, 2, device="cpu")[1] == {}  # main is not traced there
    assert (
        chosen(h100, 2, "actor.engine.kind=zero3", "critic.engine.options=[free_gathered]")[1] == {}
    )
