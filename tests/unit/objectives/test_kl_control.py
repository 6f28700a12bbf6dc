"""The adaptive weight of the KL: its formula, where it settles, what it measures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from spmdflow.config.algorithm import GroupAdvantageConfig
from spmdflow.config.schema import AdvantageConfig
from spmdflow.data.ragged import ragged
from spmdflow.errors import ConfigError
from spmdflow.objectives.kl import AdaptiveKL, measure_kl


@given(
    st.floats(1e-4, 10.0),
    st.floats(-100, 100),
    st.floats(0.1, 50.0),
    st.none() | st.floats(1e-4, 4),
)
def test_weight_follows_its_formula(
    before: float, kl: float, target: float, gain: float | None
) -> None:
    more = {} if gain is None else {"gain": gain}
    weight = AdaptiveKL(AdvantageConfig(kl_coef=before), target=target, **more)

    weight.update(kl)

    error = max(-0.2, min(0.2, (kl - target) / target))
    assert weight.value == pytest.approx(before * (1 + (gain or 0.1) * error))


def test_weight_settles_where_the_kl_that_it_causes_meets_the_target() -> None:
    weight = AdaptiveKL(AdvantageConfig(kl_coef=1.0), target=6.0)

    for _ in range(400):  # a policy whose KL is 0.3 / weight
        weight.update(0.3 / weight.value)

    assert 0.3 / weight.value == pytest.approx(6.0, rel=1e-3)


def test_weight_goes_into_any_advantage_settings_and_resumes() -> None:
    cfg = GroupAdvantageConfig(kl_coef=0.1, estimator="rloo")
    weight = AdaptiveKL(cfg, target=1.0)
    weight.update(5.0)
    resumed = AdaptiveKL(cfg, target=1.0)
    resumed.load_state_dict(weight.state_dict())

    applied = resumed.applied_to(cfg)

    assert applied.kl_coef == pytest.approx(0.102) and applied.estimator == "rloo"
    assert cfg.kl_coef == 0.1


@pytest.mark.parametrize(
    ("coef", "target", "gain"), [(0.0, 1.0, 0.1), (0.1, 0.0, 0.1), (0.1, 1.0, 0.0), (0.1, 1.0, 5.0)]
)
def test_weight_that_could_never_move_is_refused(coef: float, target: float, gain: float) -> None:
    with pytest.raises(ConfigError, match="expected all above 0"):
        AdaptiveKL(AdvantageConfig(kl_coef=coef), target=target, gain=gain)


def test_kl_of_a_response_is_summed_over_the_policys_tokens() -> None:
    lengths = torch.tensor([3, 0, 2])
    mask = torch.tensor([True, False, True, True, True])
    old = torch.tensor([-1.0, -9.0, -2.0, -0.5, -0.5])
    ref = torch.tensor([-2.0, 5.0, -1.5, -1, -1])
    columns = {"response_mask": mask, "old_log_probs": old, "ref_log_probs": ref}
    batch = TensorDict({n: ragged(x, lengths) for n, x in columns.items()}, batch_size=[3])
    shown: dict[str, Any] = {}

    made = measure_kl(batch, reduce=lambda x: x, report=shown.update)

    assert made["reference_kl"].tolist() == [0.5, 0.0, 1.0]
    assert shown["advantage/measured_kl"] == (1.5, 3.0)
