"""inspect-ai: a task with a tool, evaluated with the model openai/NAME."""

import json
import sys

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.scorer import match
from inspect_ai.solver import generate, system_message, use_tools
from inspect_ai.tool import Tool, tool

MODEL = sys.argv[2]


@tool
def add() -> Tool:
    """A tool that adds."""

    async def execute(x: int, y: int) -> int:
        """Add two numbers.

        Args:
            x: First number.
            y: Second number.
        """
        return x + y

    return execute


task = Task(
    dataset=[Sample(input="What is 20 + 22?", target="42")],
    solver=[system_message("Use the tool."), use_tools(add()), generate()],
    scorer=match(),
)
(log,) = eval(task, model=f"openai/{MODEL}", display="plain")
assert log.results is not None and log.samples is not None, log.error
result = {
    "status": log.status,
    "accuracy": log.results.scores[0].metrics["accuracy"].value,
    "roles": [message.role for message in log.samples[0].messages],
}
print("\n" + json.dumps(result))
