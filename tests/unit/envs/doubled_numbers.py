"""A taskset of verifiers: double a number; a tool is not needed."""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["DoubledNumbers"]


class NumberData(vf.TaskData):
    answer: int


class NumberTask(vf.Task[NumberData]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float((trace.last_reply or "").strip() == str(self.data.answer))

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or ""))


class DoubledNumbers(vf.Taskset[NumberTask, vf.TasksetConfig]):
    def load(self) -> Iterable[NumberTask]:
        for number in range(5):
            data = NumberData(
                prompt=f"Double {number}.", system_prompt="Only digits.", answer=2 * number
            )
            yield NumberTask(data, self.config.task)
