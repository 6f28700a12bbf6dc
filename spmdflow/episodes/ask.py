"""The one internal form of requests and replies, which all dialects are translated to and from.

An `Ask` is a chat, with messages and tools in the form of OpenAI's chat completions, or a
completion. So a conversation may be begun in one dialect and continued in another. What is asked
for and cannot be given is refused in words, never dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Set
from typing import Any, NamedTuple

import torch

from spmdflow.config.data_check import OWN_TEMPLATE_ARGUMENTS
from spmdflow.config.episode_models import POLICY
from spmdflow.rollout.generator import Finished
from spmdflow.rollout.sampling import Grammar

logger = logging.getLogger(__name__)

Message = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")
CALL_END = "</tool_call>"
_TEXT_PARTS = ("text", "input_text", "output_text")
_MOST_WARNINGS = 50
_NAME_LETTERS = 100
"""Letters of an ignored field's name that are logged."""
_REFUSAL_LETTERS = 1000
"""Letters of a refusal's text, which may quote the request. The middle of a longer one is cut
out."""


class Refusal(Exception):
    """A request that is answered with an error."""

    def __init__(
        self,
        text: str,
        *,
        status: int = 400,
        code: str = "invalid_request",
        may_retry: bool = False,
    ) -> None:
        """may_retry: the same request may succeed later. Clients are told so."""
        super().__init__(_shorten(text, _REFUSAL_LETTERS))
        self.status = status
        self.code = code
        self.may_retry = may_retry


def _shorten(text: str, max_letters: int) -> str:
    """Returns the text, or its beginning and end if it has more than `max_letters` letters.

    The two parts have max_letters // 2 letters each and are joined by " ... ".
    """
    if len(text) <= max_letters:
        return text
    half = max_letters // 2
    return f"{text[:half]} ... {text[-half:]}"


class ToolChoice(NamedTuple):
    """Which calls a reply must have."""

    name: str = ""
    """The function that must be called. Empty: any of the offered ones."""


class EarlierReply(NamedTuple):
    """A reply that a later request of the episode may name by its id and continue."""

    messages: list[Message]
    """All messages up to it, the reply included."""
    tools: list[Any] | None
    """Those that its request offered."""


class Ask(NamedTuple):
    """A request for a chat or a completion."""

    messages: list[Message]
    """Messages of a chat. Empty: a completion."""
    prompt: str | list[int] = ""
    tools: list[Any] | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    with_usage: bool = False
    """Whether a stream ends with the token counts."""
    log_probs: bool = False
    token_ids: bool = False
    top_log_probs: int = 0
    """How many of the likeliest tokens are reported at each position."""
    grammar: Grammar | None = None
    """What the text of the reply must match, by `response_format`."""
    choice: ToolChoice | None = None
    """Calls that the reply must have. None: it may have any or none."""
    one_call: bool = False
    """Whether the reply ends with its first call."""
    num_instructions: int = 0
    """Messages at the beginning that belong to this request alone."""
    is_kept: bool = False
    """Whether a later request may continue the reply by its id alone (Anthropic's threads)."""
    kept_tools: list[Any] | None = None
    """The tools that such a request has if it names none."""
    is_legacy: bool = False
    """Whether tools came as `functions`, so that a call goes back as `function_call`."""
    name: str = ""
    """Of the request's URL: a player or a subagent. Empty: none."""
    model: str = POLICY
    """Name of the model that replies."""
    num_choices: int = 1
    """How many replies are generated to the same prompt."""
    template_arguments: Mapping[str, Any] | None = None
    """Variables of the chat template, which replace those of the run."""
    reasoning_effort: str | None = None
    """How long the model shall think, for chat templates that read it."""

    @property
    def ends(self) -> tuple[str, ...]:
        """The strings with which the reply ends: its stop strings, and the end of the only call
        that it may have. (A grammar for its calls counts them itself.)"""
        if self.one_call and self.choice is None:
            return (*self.stop, CALL_END)
        return self.stop


class Reply(NamedTuple):
    """A recorded reply, from which the answer is built."""

    name: str
    """Letters and digits that no other reply of the run has."""
    message: Message
    reason: str
    """stop, length or tool_calls."""
    prompt_ids: list[int]
    drawn: Finished
    pieces: list[str]
    """Text of each token, if log-probabilities are requested."""
    stopped_by: str | None = None
    """The stop string that ended it."""
    top_pieces: tuple[tuple[str, ...], ...] = ()
    """Text of the likeliest tokens at each position, if they are requested."""
    counts: tuple[int, int] | None = None
    """Tokens of prompt and reply, of a reply whose tokens are not known here."""

    @classmethod
    def of_text(cls, name: str, message: Message, reason: str, counts: tuple[int, int]) -> Reply:
        """A reply of a server outside of the run, of which only the text is known."""
        drawn = Finished(0, torch.zeros(0, dtype=torch.int64), torch.zeros(0))
        return cls(name, message, reason, [], drawn, [], counts=counts)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids) if self.counts is None else self.counts[0]

    @property
    def num_tokens(self) -> int:
        """Tokens of the reply."""
        return len(self.drawn.tokens) if self.counts is None else self.counts[1]


def warn_of_ignored(body: Mapping[str, Any], supported: Set[str], warned_fields: set[str]) -> None:
    """Logs a warning for each field of a request that is not supported, at most 50 in all.

    warned_fields: names of fields that were logged; names are added.
    """
    if body.keys() <= supported:
        return
    unknown = sorted(body.keys() - supported - warned_fields)
    for name in unknown[: max(0, _MOST_WARNINGS - len(warned_fields))]:
        warned_fields.add(name)
        shown = _shorten(name, _NAME_LETTERS)
        logger.warning("episodes: requests have the field %r, which is ignored", shown)


def read_object(body: object) -> dict[str, Any]:
    """The body itself; Refusal unless it is a JSON object."""
    if not isinstance(body, dict):
        raise Refusal(f"got a body that is {type(body).__name__}, expected a JSON object")
    return body


def read_limit(body: Mapping[str, Any], *names: str) -> int | None:
    """The largest number of tokens of a reply, from the fields that may state it; None: no limit.

    Refusal unless those that are given are equal, whole and above 0. 5.0 is 5.
    """
    limits = set()
    for name in names:
        limit = body.get(name)
        if isinstance(limit, float) and limit.is_integer():
            limit = int(limit)
        if limit is not None:
            limits.add(limit)
    if len(limits) > 1 or not all(type(limit) is int and limit > 0 for limit in limits):
        raise Refusal(f"{names[0]}: got {sorted(map(str, limits))}, expected one number above 0")
    return next(iter(limits), None)


def read_template_arguments(value: object) -> dict[str, Any] | None:
    """The variables of the chat template in the field chat_template_kwargs; None: there are none.

    Refusal unless it is an object whose names are identifiers that the rendering does not set
    itself.
    """
    if value is None or value == {}:
        return None
    if not isinstance(value, dict):
        got = type(value).__name__
        raise Refusal(f"chat_template_kwargs: got {got}, expected an object of variables")
    for name in value:
        if not name.isidentifier() or name in OWN_TEMPLATE_ARGUMENTS:
            raise Refusal(
                f"chat_template_kwargs: got {name!r}, expected variables that the chat template "
                f"reads and the endpoint does not set itself; leave it out"
            )
    return value


def read_effort(field: str, value: object) -> str | None:
    """How long the model shall think, as a word; None: nothing is said. Refusal otherwise."""
    if value is None or isinstance(value, str):
        return value
    raise Refusal(f"{field}: got {value!r}, expected a word such as low, medium or high")


def read_stop(field: str, value: object) -> tuple[str, ...]:
    """Stop strings, given as one text or several. Refusal for anything else, or an empty text."""
    if value is None or value == []:
        return ()
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise Refusal(f"{field}: got {value!r}, expected texts that are not empty")
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as err:
            raise Refusal(f"{field}: got a text with half a character, expected Unicode") from err
    return tuple(texts)


def read_messages(messages: object) -> list[Message]:
    """Checked copies of a chat's messages. Refusal for unknown roles, and parts that are no text.

    Parts of text are joined. A role `function` and a `function_call` of a message become those of
    tools.
    """
    if not isinstance(messages, list) or not messages:
        raise Refusal("messages: got no list of objects with a role; expected at least one")
    result = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Refusal("messages: got no list of objects with a role; expected at least one")
        result.append(_read_message(message))
    return result


def _read_message(message: Message) -> Message:
    checked = dict(message)
    if checked["role"] == "function":
        checked["role"] = "tool"
    if checked["role"] not in ROLES:
        expected = ", ".join(ROLES)
        raise Refusal(f"messages: got the role {checked['role']!r}, expected one of {expected}")
    call = checked.pop("function_call", None)
    if isinstance(call, dict) and not checked.get("tool_calls"):
        checked["tool_calls"] = [{"id": "", "type": "function", "function": call}]
    content = checked.get("content")
    if content is not None and not isinstance(content, str):
        checked["content"] = join_parts("messages", content)
    for name in ("audio", "images", "files"):
        if checked.get(name):
            raise _not_text("messages", name)
    return checked


def join_parts(field: str, parts: object) -> str:
    """The text of a list of parts. Refusal if one of them is no text."""
    if not isinstance(parts, list):
        got = type(parts).__name__
        raise Refusal(f"{field}: got content that is {got}, expected a text or parts of text")
    texts = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
        if kind == "refusal":
            texts.append(str(part.get("refusal", "")))
        elif kind in _TEXT_PARTS and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            raise _not_text(field, str(kind))
    return "".join(texts)


def _not_text(field: str, kind: str) -> Refusal:
    return Refusal(
        f"{field}: got content of the kind {kind!r}, expected text: the policy reads no images, "
        f"audio or files; send their text",
        code="unsupported_content",
    )


def function_tool(function: Mapping[str, Any]) -> dict[str, Any]:
    """A tool in the form of chat completions, from its name, description and parameters.

    Refusal without a name.
    """
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise Refusal(
            "tools: got a function without a name; expected name, description, parameters"
        )
    kept = {}
    for name in ("name", "description", "parameters"):
        if function.get(name) is not None:
            kept[name] = function[name]
    return {"type": "function", "function": kept}


def read_choice(name: str | None, tools: list[Any] | None) -> ToolChoice:
    """The choice of a function by name (None: any of the offered ones). Refusal if it is not
    offered."""
    offered = []
    for tool in tools or ():
        offered.append(tool["function"]["name"])
    if not offered:
        raise Refusal("tool_choice: got a call that the reply must have, expected tools with it")
    if name is not None and name not in offered:
        raise Refusal(f"tool_choice: got the function {name!r}, expected one of {offered}")
    return ToolChoice(name or "")
