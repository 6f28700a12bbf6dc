"""pydantic-ai: an agent with a tool and a typed answer; a second run with the history."""

import json
import sys

from pydantic import BaseModel
from pydantic_ai import Agent

MODEL = sys.argv[2]


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    degrees: int


agent = Agent(f"openai:{MODEL}", output_type=[Weather, str], instructions="Use the tool.")


@agent.tool_plain
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"{city}: 21 degrees"


first = agent.run_sync("How warm is it in Paris?")
second = agent.run_sync("Are you sure?", message_history=first.all_messages())
assert isinstance(first.output, Weather)
result = {
    "output": first.output.model_dump(),
    "second": second.output,
    "requests": first.usage.requests,
}
print(json.dumps(result))
