"""smolagents: an agent that calls tools, and one that writes code."""

import json
import os
import sys

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool

MODEL = sys.argv[2]


@tool
def multiply(a: int, b: int) -> int:
    """The product of two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


model = OpenAIModel(
    model_id=MODEL,
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
)
calls = ToolCallingAgent(tools=[multiply], model=model).run("What is 6 times 7?")
code = CodeAgent(tools=[multiply], model=model).run("What is 12 times 12?")
sys.stdout.flush()
print("\n" + json.dumps({"calls": calls, "code": code}))
