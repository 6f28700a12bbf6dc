"""A worker extension of a vLLM server that loses one update: it receives it and writes nothing."""

from __future__ import annotations

from spmdflow.serving.worker import WeightTaker

LOST_SWITCH = 3
"""Number of the switch, counted from one, that changes no weight."""


class ForgetfulTaker(WeightTaker):
    """`WeightTaker`, but for one switch."""

    spmdflow_num_switches = 0

    def spmdflow_switch(self, number: int, verify: bool, seconds: float) -> dict[str, int]:
        """See WeightTaker.spmdflow_switch."""
        self.spmdflow_num_switches += 1
        if self.spmdflow_num_switches == LOST_SWITCH:
            assert self._spmdflow_update is not None
            self._spmdflow_update.result(seconds).clear()
        return super().spmdflow_switch(number, verify, seconds)
