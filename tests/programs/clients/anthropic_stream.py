"""anthropic: tools in streamed messages, and the runner of tools."""

import json
import sys
from typing import Any

from anthropic import Anthropic, beta_tool

MODEL = sys.argv[2]

client = Anthropic()
tools: Any = [
    {
        "name": "get_weather",
        "description": "The weather of a city.",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    }
]
messages: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
texts = []
inputs = []
while True:
    with client.messages.stream(
        model=MODEL, max_tokens=1024, system="Be brief.", messages=messages, tools=tools
    ) as stream:
        for event in stream:
            if event.type == "text":
                texts.append(event.text)
        message = stream.get_final_message()
    messages.append({"role": "assistant", "content": message.content})
    results = []
    for block in message.content:
        if block.type == "tool_use":
            inputs.append(block.input)
            text = f"{block.input['city']}: 21 degrees"
            results.append({"type": "tool_result", "tool_use_id": block.id, "content": text})
    if message.stop_reason != "tool_use":
        break
    messages.append({"role": "user", "content": results})


@beta_tool
def add(a: int, b: int) -> str:
    """The sum of two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return str(a + b)


runner = client.beta.messages.tool_runner(
    model=MODEL,
    max_tokens=1024,
    tools=[add],
    messages=[{"role": "user", "content": "What is 2 + 3?"}],
)
last = runner.until_done()
result = {
    "inputs": inputs,
    "text": "".join(texts),
    "stop": message.stop_reason,
    "kinds": [[block.type for block in each["content"]] for each in messages[1::2]],
    "sum": last.content[-1].text,
}
print(json.dumps(result))
