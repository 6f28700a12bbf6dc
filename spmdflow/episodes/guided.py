"""Replies that must have a given form: JSON of a schema, or a call of a tool.

`response_format` becomes a grammar by itself. For a call the grammar depends on how the model
writes calls, which the run's settings say (`tool_parser`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from spmdflow.episodes.ask import Ask, Refusal, function_tool
from spmdflow.errors import ConfigError
from spmdflow.rollout.grammar import check_grammar
from spmdflow.rollout.sampling import Grammar

_STYLES = {
    None: "qwen_3",
    "hermes": "qwen_3",
    "llama3_json": "llama",
    "qwen3_coder": "qwen_3_coder",
}
"""tool_parser -> xgrammar's name of the form of calls. None: <tool_call>{...}</tool_call>."""
_OPEN_THOUGHT = "<think>"


def format_grammar(field: str, form: Any) -> Grammar | None:
    """The grammar of a format {"type": text, json_object or json_schema, "schema": ...}.

    None for text. Refusal for anything else.
    """
    if form is None:
        return None
    kind = form.get("type") if isinstance(form, dict) else form
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar("json_schema", '{"type": "object"}')
    if kind == "json_schema" and isinstance(form.get("schema"), dict):
        return Grammar("json_schema", json.dumps(form["schema"]))
    raise Refusal(
        f"{field}: got {form!r}, expected the type text, json_object, or json_schema with a schema"
    )


@dataclass(frozen=True)
class GuidedReplies:
    """What this run can make replies conform to."""

    is_guided: bool = True
    """Whether the generator takes grammars, and reports the likeliest tokens."""
    tool_parser: str | None = None
    """See EpisodeConfig.tool_parser."""
    has_own_form: bool = False
    """Whether the tokenizer says how calls are written, by a response template."""

    @property
    def style(self) -> str | None:
        """xgrammar's name of the form of calls; None if it is not known."""
        if self.has_own_form and self.tool_parser is None:
            return None
        return _STYLES.get(self.tool_parser)

    def with_grammar(self, ask: Ask) -> Ask:
        """The request with the grammar of its reply, and with the stop string that ends a reply
        after its first call. Refusal if that is asked for and cannot be met."""
        if ask.top_log_probs and not self.is_guided:
            raise _unguided("top_logprobs")
        if ask.choice is not None:
            ask = ask._replace(grammar=self._calls(ask))
        elif ask.one_call and self.style != "qwen_3":
            raise Refusal(
                f"parallel_tool_calls: got False with calls in the form of "
                f"{self.tool_parser or 'the tokenizer'}, expected True or nothing: where the "
                f"first call ends is known of <tool_call> alone"
            )
        if ask.grammar is None:
            return ask
        if not self.is_guided:
            raise _unguided("response_format or tool_choice")
        try:
            check_grammar(ask.grammar)
        except ConfigError as err:
            raise Refusal(str(err), code="unsupported_format") from err
        return ask

    def _calls(self, ask: Ask) -> Grammar:
        """The grammar of a reply that consists of the calls that it must have."""
        if self.style is None:
            raise Refusal(
                f"tool_choice: got a call that the reply must have, in the form of "
                f"{self.tool_parser or 'the tokenizer'}, expected auto: the grammar of calls is "
                f"known for {', '.join(str(name or 'tool_parser=null') for name in _STYLES)}"
            )
        if not self.is_guided:
            raise _unguided("tool_choice")
        assert ask.choice is not None
        tools = []
        for tool in ask.tools or ():
            tools.append(function_tool(tool["function"]))
        choice: Any = "required"
        if ask.choice.name:
            choice = {"type": "function", "function": {"name": ask.choice.name}}
        try:
            xgrammar = import_module("xgrammar")
        except ImportError:
            check_grammar(Grammar("structural_tag", "{}"))  # says what to install
            raise
        tag = xgrammar.get_model_structural_tag(
            self.style, tools, choice, reasoning=False, parallel_tool_calls=not ask.one_call
        )
        return Grammar("structural_tag", tag.model_dump_json())


def after_thought(grammar: Grammar | None, prompt_text: str) -> Grammar | None:
    """The grammar of a reply to this prompt.

    If the chat template has opened a thought, the thought is free and the grammar applies behind
    it.
    """
    if grammar is None or not prompt_text.rstrip().endswith(_OPEN_THOUGHT):
        return grammar
    form = json.loads(grammar.text)
    if grammar.kind == "json_schema":
        form = {"type": "json_schema", "json_schema": form}
    else:
        form = form["format"]
    thought = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "</think>"}
    both = {"type": "sequence", "elements": [thought, form]}
    return Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": both}))


def _unguided(field: str) -> Refusal:
    return Refusal(
        f"{field}: this run's generator cannot do that; choose another actor.rollout.engine",
        code="unsupported_format",
    )
