"""The programs that are tested: what each runs, what the model says, and what must come of it."""

from __future__ import annotations

from typing import Any, NamedTuple

OPENAI = {"OPENAI_BASE_URL": "{base_url}", "OPENAI_API_KEY": "{api_key}"}
ANTHROPIC = {"ANTHROPIC_BASE_URL": "{root_url}", "ANTHROPIC_API_KEY": "{api_key}"}


class Reply(NamedTuple):
    """What the model says to a message."""

    to: str
    """Part of the message."""
    says: str
    thought: str = ""
    guided: bool = False
    """Whether a grammar limits the reply: tokens that it forces are not trained."""
    is_stopped: bool = False
    """Whether a stop string of the program ends it, so that it has no end token."""


class Program(NamedTuple):
    """A program that runs unmodified."""

    name: str
    """Of its file in `clients`."""
    environment: str
    """Of its virtual environment."""
    runs: str
    """What is run with its defaults; for the page."""
    needs: str
    """For the page."""
    replies: tuple[Reply, ...]
    result: Any
    """What the program found out."""
    segments: tuple[tuple[int, ...], ...]
    """Indices of the replies of each segment."""
    scores: tuple[float, ...] = ()
    """Of each segment. Empty: all 1."""
    variables: dict[str, str] = OPENAI
    settings: tuple[str, ...] = ()
    """Of the run."""
    prompt: str = "go"
    """Of the data row, where the environment reads it."""
    episode: str = "{here}/environment.py:episode"
    """The environment of the run. bin: folder of the program's commands. here: this folder."""


def call(name: str, arguments: str) -> str:
    """A tool call in the form that the template asks for."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


PROGRAMS = (
    Program(
        name="openai_chat",
        environment="openai",
        runs="chat completions: parallel calls of a tool, a streamed reply",
        needs="",
        replies=(
            Reply(
                "weather in Paris",
                call("get_weather", '{"city": "Paris"}')
                + "\n"
                + call("get_weather", '{"city": "Rome"}'),
                thought="I need both.",
            ),
            Reply("Rome: 21 degrees", "It is 21 degrees in both."),
            Reply("And tomorrow?", "I do not know the weather of tomorrow \u2602."),
        ),
        result={
            "cities": ["Paris", "Rome"],
            "finish": "tool_calls",
            "answer": "It is 21 degrees in both.",
            "streamed": "I do not know the weather of tomorrow \u2602.",
        },
        segments=((0, 1, 2),),
    ),
    Program(
        name="openai_responses",
        environment="openai",
        runs="responses: a tool, `previous_response_id`, a streamed reply",
        needs="",
        replies=(
            Reply(
                "weather in Paris",
                call("get_weather", '{"city": "Paris"}'),
                thought="I look it up.",
            ),
            Reply("Paris: 21 degrees", "It is 21 degrees."),
            Reply("And tomorrow?", "I do not know."),
        ),
        result={
            "cities": ["Paris"],
            "kinds": ["reasoning", "function_call"],
            "answer": "It is 21 degrees.",
            "streamed": "I do not know.",
            "last": "I do not know.",
        },
        segments=((0, 1, 2),),
    ),
    Program(
        name="openai_parse",
        environment="openai",
        runs="`parse` of chat completions and of responses with a pydantic model",
        needs="the extra `structured`, for guided decoding",
        replies=(
            Reply(
                "3x = 12",
                '{"steps": [{"explanation": "divide", "output": "x = 4"}], "answer": 4}',
                guided=True,
            ),
            Reply("5x = 10", '{"steps": [], "answer": 2}', guided=True),
        ),
        result={
            "chat": {"steps": [{"explanation": "divide", "output": "x = 4"}], "answer": 4},
            "responses": {"steps": [], "answer": 2},
        },
        segments=((0,), (1,)),
    ),
    Program(
        name="litellm_tools",
        environment="litellm",
        runs="completion: a tool, a streamed reply, a pydantic model as `response_format`",
        needs=(
            "the last variable only where GitHub cannot be reached: otherwise it waits for its "
            "list of prices. `response_format` needs the extra `structured`"
        ),
        replies=(
            Reply(
                "weather in Paris",
                call("get_weather", '{"city": "Paris"}'),
                thought="I look it up.",
            ),
            Reply("Paris: 21 degrees", "It is 21 degrees."),
            Reply("capital of France", '{"name": "Paris", "country": "France"}', guided=True),
        ),
        result={
            "call": '{"city": "Paris"}',
            "thought": "I look it up.",
            "streamed": "It is 21 degrees.",
            "city": {"name": "Paris", "country": "France"},
        },
        segments=((0, 1), (2,)),
        variables=OPENAI | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    ),
    Program(
        name="langgraph_agent",
        environment="langgraph",
        runs=(
            "`create_agent` with two tools and a memory, streamed tokens, `with_structured_output`"
        ),
        needs="`with_structured_output` needs the extra `structured`",
        replies=(
            Reply(
                "How warm is it in Paris",
                call("get_weather", '{"city": "Paris"}') + "\n" + call("add", '{"a": 2, "b": 3}'),
            ),
            Reply("Paris: 21 degrees", "21 degrees, and 5."),
            Reply("Twice as warm", "That is 42 degrees."),
            Reply("warm is it in Rome", '{"city": "Rome", "degrees": 23}', guided=True),
        ),
        result={
            "kinds": ["human", "ai", "tool", "tool", "ai"],
            "answer": "21 degrees, and 5.",
            "streamed": "That is 42 degrees.",
            "structured": {"city": "Rome", "degrees": 23},
        },
        segments=((0, 1, 2), (3,)),
    ),
    Program(
        name="pydantic_ai_agent",
        environment="pydantic_ai",
        runs="an agent with a tool and a typed answer, continued with its history",
        needs="",
        replies=(
            Reply(
                "How warm is it in Paris?",
                call("get_weather", '{"city": "Paris"}'),
                thought="I look it up.",
            ),
            Reply(
                "Paris: 21 degrees",
                call("final_result", '{"city": "Paris", "degrees": 21}'),
                thought="Now I know.",
            ),
            Reply("Are you sure?", "Yes, I am."),
        ),
        result={
            "output": {"city": "Paris", "degrees": 21},
            "second": "Yes, I am.",
            "requests": 2,
        },
        segments=((0, 1, 2),),
    ),
    Program(
        name="instructor_extract",
        environment="instructor",
        runs="`from_provider` in its default mode, with a second try after a failed validation",
        needs="the extra `structured`",
        replies=(
            Reply("Ann is 31", call("Person", '{"name": "Ann", "age": 31}'), guided=True),
            Reply("capital letters", call("Person", '{"name": "ANN", "age": 31}'), guided=True),
        ),
        result={"name": "ANN", "age": 31},
        segments=((0, 1),),
    ),
    Program(
        name="openai_agents_handoff",
        environment="openai_agents",
        runs="an agent that hands over to another one with a tool; a streamed second run",
        needs=(
            "the last variable only because it otherwise sends its traces, with the key, to "
            "OpenAI. A handoff has another system prompt and other tools, so it begins a "
            "segment"
        ),
        replies=(
            Reply("weather in Paris", call("transfer_to_weather", "{}")),
            Reply('{"assistant": "Weather"}', call("get_weather", '{"city": "Paris"}')),
            Reply("Paris: 21 degrees", "It is 21 degrees."),
            Reply("And tomorrow?", "I do not know."),
        ),
        result={
            "agent": "Weather",
            "answer": "It is 21 degrees.",
            "streamed": "I do not know.",
            "kinds": ["agent_updated_stream_event", "raw_response_event", "run_item_stream_event"],
        },
        segments=((0,), (1, 2, 3)),
        variables=OPENAI
        | {"OPENAI_DEFAULT_MODEL": "{model}", "OPENAI_AGENTS_DISABLE_TRACING": "1"},
    ),
    Program(
        name="smolagents_agents",
        environment="smolagents",
        runs="`ToolCallingAgent` and `CodeAgent` with a tool",
        needs=(
            "the address and the key are arguments of its model. It repeats replies in another "
            "form (`Calling tools: ...`), so each reply is a segment"
        ),
        replies=(
            Reply("6 times 7", call("multiply", '{"a": 6, "b": 7}'), guided=True),
            Reply("42", call("final_answer", '{"answer": "42"}'), guided=True),
            Reply(
                "12 times 12",
                "Thought: I multiply.\n<code>\nproduct = multiply(12, 12)\nprint(product)\n</code>",
                is_stopped=True,
            ),
            Reply("144", "Thought: done.\n<code>\nfinal_answer(product)\n</code>", is_stopped=True),
        ),
        result={"calls": "42", "code": 144},
        segments=((0,), (1,), (2,), (3,)),
    ),
    Program(
        name="inspect_ai_eval",
        environment="inspect_ai",
        runs="`eval` of a task with a tool and a scorer, model `openai/NAME`",
        needs="it first asks the model to say hello, which is a segment of its own",
        replies=(
            Reply("Please say", "hello, world"),
            Reply("20 + 22", call("add", '{"x": 20, "y": 22}'), thought="I add."),
            Reply("42", "42"),
        ),
        result={
            "status": "success",
            "accuracy": 1.0,
            "roles": ["system", "user", "assistant", "tool", "assistant"],
        },
        segments=((0,), (1, 2)),
    ),
    Program(
        name="anthropic_stream",
        environment="anthropic",
        runs="streamed messages with a tool; the runner of tools",
        needs="the address without `/v1`. Its runner of tools uses threads",
        replies=(
            Reply(
                "weather in Paris",
                "I look. " + call("get_weather", '{"city": "Paris"}'),
                thought="Where is Paris?",
            ),
            Reply("Paris: 21 degrees", "It is 21 degrees."),
            Reply("2 + 3", call("add", '{"a": 2, "b": 3}')),
            Reply("5", "It is 5."),
        ),
        result={
            "inputs": [{"city": "Paris"}],
            "text": "I look.It is 21 degrees.",
            "stop": "end_turn",
            "kinds": [["thinking", "text", "tool_use"], ["text"]],
            "sum": "It is 5.",
        },
        segments=((0, 1), (2, 3)),
        variables=ANTHROPIC,
    ),
    Program(
        name="textarena_players",
        environment="textarena",
        runs="TicTacToe-v0 between two of its `OpenAIAgent`",
        needs=(
            "a name in the address of each player. Its agents send all moves as one message, so"
            " each reply is a segment"
        ),
        replies=(
            Reply("[Player 1] [3]", "[6]"),
            Reply("[Player 0] [2]", "[3]"),
            Reply("[Player 1] [0]", "[2]"),
            Reply("[Player 0] [4]", "[0]"),
            Reply("You are Player 0", "[4]"),
        ),
        result={
            "moves": [[0, "[4]"], [1, "[0]"], [0, "[2]"], [1, "[3]"], [0, "[6]"]],
            "segment_scores": {"player-0": 1, "player-1": -1},
        },
        segments=((4,), (3,), (2,), (1,), (0,)),
        settings=("actor.rollout.episode.credit=segment",),
        scores=(1.0, -1.0, 1.0, -1.0, 1.0),
    ),
    Program(
        name="verifiers_eval",
        environment="verifiers",
        runs="`vf-eval` of a taskset with a tool server, through its interception server",
        needs=(
            "`--client.base-url`, `--client.api-key-var OPENAI_API_KEY`, the runtime "
            "`subprocess` (by default a sandbox of its makers), and a harness that starts its "
            "chat program without uv, which would fetch packages"
        ),
        replies=(
            Reply("20 + 22", call("sums_add", '{"a": 20, "b": 22}'), thought="I add."),
            Reply("42", "It is 42."),
        ),
        result={
            "rewards": {"is_right": {"score": 1.0, "weight": 1.0}},
            "roles": ["system", "user", "assistant", "tool", "assistant"],
        },
        segments=((0, 1),),
        variables=OPENAI | {"PYTHONPATH": "{clients}"},
    ),
    Program(
        name="mcp_time",
        environment="mcp",
        runs="mcp-server-time's tools through the bridge `spmdflow.envs.mcp`",
        needs="the bridge, which starts the server; `mcp` in the environment of the run",
        replies=(
            Reply(
                "in Tokyo",
                call(
                    "convert_time",
                    '{"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"}',
                ),
                thought="I convert it.",
            ),
            Reply("21:00", "It is 21:00."),
        ),
        result={
            "roles": ["user", "assistant", "tool", "assistant"],
            "difference": "+9.0h",
            "answer": "It is 21:00.",
        },
        segments=((0, 1),),
        variables={},
        prompt="When it is 12:00 UTC, what time is it in Tokyo?",
        episode=(
            "spmdflow.envs.mcp:episode(server='{bin}/mcp-server-time --local-timezone UTC', "
            "score='{here}/environment.py:keep_messages')"
        ),
    ),
)
