"""vLLM's tool parsers by name: they read tool calls in the format of each model family.

vLLM is imported when a parser is requested, whichever generator is used. Knows no conversations.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from spmdflow.errors import ConfigError
from spmdflow.rollout.vllm_contract import import_vllm
from spmdflow.rollout.vllm_process import preserve_process_state

KEY = "actor.rollout.episode.tool_parser"
CallReader = Callable[[str, list[Any]], tuple[str, list[dict[str, Any]]]]
"""(text with special tokens, offered tools) -> (text outside of calls, calls with name, arguments
and id). An id that is not in the text was made up by the parser."""


def vllm_call_reader(name: str, tokenizer: Any) -> CallReader:
    """Returns a reader of tool calls that uses vLLM's tool parser of this name.

    The names are those of `vllm serve --tool-call-parser`. tokenizer: from transformers.
    ConfigError if vLLM is not installed, if there is no such parser, or if the tokenizer lacks its
    tokens. Random states and environment variables are as before.
    """
    with preserve_process_state(own_variables="VLLM_"):
        import_vllm(KEY, otherwise=f"{KEY}=null")
        manager = import_module("vllm.tool_parsers").ToolParserManager
        try:
            parser = manager.get_tool_parser(name)
        except KeyError as err:
            expected = f"one of {', '.join(sorted({*manager.tool_parsers, *manager.lazy_parsers}))}"
            raise ConfigError.of(KEY, repr(name), expected, "choose one") from err
        protocol = import_module("vllm.entrypoints.openai.chat_completion.protocol")
        try:
            parser(tokenizer)
        except RuntimeError as err:  # it looks up its tokens in the vocabulary
            got = f"{name!r}, which does not fit the tokenizer ({err})"
            do = "choose the one that vLLM's documentation recommends for the model"
            raise ConfigError.of(KEY, got, "a parser for its tokens", do) from err

    def read(text: str, tools: list[Any]) -> tuple[str, list[dict[str, Any]]]:
        """Returns (text outside of calls, calls as {"name": ..., "arguments": ..., "id": ...}).

        Without a call, returns the unchanged text and [].
        """
        messages = [{"role": "user", "content": ""}]
        request = protocol.ChatCompletionRequest(messages=messages, tools=tools)
        parsed = parser(tokenizer, request.tools).extract_tool_calls(text, request)
        if not parsed.tools_called:
            return text, []
        calls = []
        for call in parsed.tool_calls:
            function = call.function
            fields = {"name": function.name, "arguments": function.arguments, "id": call.id}
            calls.append(fields)
        return parsed.content or "", calls

    return read
