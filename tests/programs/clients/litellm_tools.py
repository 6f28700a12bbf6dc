"""litellm: a tool, a streamed reply, and a pydantic model as response_format."""

import json
import sys
from typing import Any

import litellm
from pydantic import BaseModel

MODEL = sys.argv[2]


class City(BaseModel):
    """A city."""

    name: str
    country: str


tools: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
messages: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
first: Any = litellm.completion(model=f"openai/{MODEL}", messages=messages, tools=tools)
message = first.choices[0].message
messages.append(message)
for call in message.tool_calls:
    city = json.loads(call.function.arguments)["city"]
    messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{city}: 21 degrees"})
parts = []
stream: Any = litellm.completion(
    model=f"openai/{MODEL}", messages=messages, tools=tools, stream=True
)
for chunk in stream:
    parts.append(chunk.choices[0].delta.content or "")
question: Any = [{"role": "user", "content": "Which city is the capital of France?"}]
third: Any = litellm.completion(model=f"openai/{MODEL}", messages=question, response_format=City)
result = {
    "call": message.tool_calls[0].function.arguments,
    "thought": getattr(message, "reasoning_content", None),
    "streamed": "".join(parts),
    "city": City.model_validate_json(third.choices[0].message.content).model_dump(),
}
print(json.dumps(result))
