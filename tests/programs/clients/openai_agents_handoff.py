"""openai-agents: a triage agent hands over to another one, which calls a tool; then it streams."""

import asyncio
import json

from agents import Agent, Runner, function_tool


@function_tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"{city}: 21 degrees"


weather = Agent(
    name="Weather",
    instructions="You know the weather.",
    tools=[get_weather],
    handoff_description="Knows the weather",
)
triage = Agent(name="Triage", instructions="Hand over to the right agent.", handoffs=[weather])


async def main() -> None:
    """Two runs, the second one streamed."""
    first = await Runner.run(triage, "What is the weather in Paris?")
    more = [*first.to_input_list(), {"role": "user", "content": "And tomorrow?"}]
    second = Runner.run_streamed(first.last_agent, more)
    kinds = set()
    async for event in second.stream_events():
        kinds.add(event.type)
    result = {
        "agent": first.last_agent.name,
        "answer": first.final_output,
        "streamed": second.final_output,
        "kinds": sorted(kinds),
    }
    print(json.dumps(result))


asyncio.run(main())
