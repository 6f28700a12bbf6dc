"""The one form of error messages."""

from __future__ import annotations

import pytest

from spmdflow.errors import ConfigError, RunFailed, SpmdflowError


@pytest.mark.parametrize("kind", [ConfigError, RunFailed])
def test_error_of_parts_is_of_its_class_and_says_got_expected_and_what_to_do(
    kind: type[SpmdflowError],
) -> None:
    error = kind.of("actor.layout", repr("x2"), "sizes such as t2", "set actor.layout=t2")

    assert type(error) is kind
    assert str(error) == "actor.layout: got 'x2', expected sizes such as t2; set actor.layout=t2"
