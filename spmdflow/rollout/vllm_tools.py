"""vLLM's tool parsers by name: the calls of tools in a reply, as each family of models writes them.

vLLM is imported when a parser is asked for, whatever generates. Knows no conversations.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from spmdflow.errors import ConfigError
from spmdflow.rollout.vllm_contract import import_vllm
from spmdflow.rollout.vllm_process import process_state_kept

KEY = "actor.rollout.episode.tool_parser"
CallReader = Callable[[str, list[Any]], tuple[str, list[dict[str, Any]]]]
"""(text with its special tokens, offered tools) -> (what is no call, calls with name and
arguments)."""


def vllm_call_reader(name: str, tokenizer: Any) -> CallReader:
    """Reads replies by the parser that `vllm serve --tool-call-parser` has under that name.

    Any: a transformers tokenizer. ConfigError if there is no such parser, or the tokenizer lacks
    its tokens.
    """
    with process_state_kept(own_variables="VLLM_"):
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
        except RuntimeError as err:  # it looks for its tokens
            got = f"{name!r}, which does not fit the tokenizer ({err})"
            do = "choose the one that vLLM's documentation names for the model"
            raise ConfigError.of(KEY, got, "a parser for its tokens", do) from err

    def read(text: str, tools: list[Any]) -> tuple[str, list[dict[str, Any]]]:
        asked = [{"role": "user", "content": ""}]
        request = protocol.ChatCompletionRequest(messages=asked, tools=tools)
        found = parser(tokenizer, request.tools).extract_tool_calls(text, request)
        if not found.tools_called:
            return text, []
        calls = [call.function for call in found.tool_calls]
        return found.content or "", [{"name": f.name, "arguments": f.arguments} for f in calls]

    return read
