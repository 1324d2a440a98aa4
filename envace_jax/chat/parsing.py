"""What a sampled turn means: reasoning, content and calls of the actor, or the value a rehearsal answers with.

Both parsers walk the text once. Outside thinking an opening tag starts a body, the body is read as JSON from its front,
and the closing tag must follow. So a tag inside a JSON string is data, and a tag inside thinking is thought. Where the
tags are is given from outside: found in the text (`parse_tool_calls`), or known from the sampled control ids
(`ChatTokenizer.parse_turn`), where a tag spelled with ordinary tokens is no tag.

Nothing here raises on any text: a model can write anything, and an episode must end with a verdict, not a traceback.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from envace_jax.chat.strict_json import decode, decode_prefix, skip_space, well_formed

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
RESPONSE_OPEN, RESPONSE_CLOSE = "<tool_response>", "</tool_response>"
RESULT_OPEN, RESULT_CLOSE = "<execution_result>", "</execution_result>"
TURN_END = "<|im_end|>"
ERROR_KEY = "error_tool_call"

_TURN_TAGS = re.compile("|".join(map(re.escape, (THINK_OPEN, THINK_CLOSE, CALL_OPEN, CALL_CLOSE))))
_RESULT_TAGS = re.compile("|".join(map(re.escape, (THINK_OPEN, THINK_CLOSE, RESULT_OPEN))))


class Tag(NamedTuple):
    """A tag that counts as one: `text[start:end]` is its spelling, `name` its meaning (e.g. `<tool_call>`)."""

    start: int
    end: int
    name: str


@dataclass(frozen=True)
class ParseError:
    """Why a text could not be read.

    Codes of a turn: UNCLOSED_TAG, MALFORMED_JSON, MISSING_NAME, MISSING_ARGUMENTS, INVALID_ARGUMENTS, and from ids
    also UNEXPECTED_CONTROL. Codes of a rehearsal: EMPTY, MISSING_TAG, UNCLOSED_TAG, MALFORMED_JSON, INVALID_RESULT.
    """

    code: str
    message: str

    def as_result(self) -> dict[str, Any]:
        """The error as a tool result, in the spelling in which a rehearser declares a violation of the protocol."""
        return {ERROR_KEY: {"code": self.code, "message": self.message}}


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """One turn of the actor. With an error there are no calls: a bad call spoils the whole turn."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()
    error: ParseError | None = None

    def message(self) -> dict[str, Any]:
        """The turn as a message that `ChatTokenizer.render` takes, for where history is rendered anew."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            functions = ({"name": call.name, "arguments": call.arguments} for call in self.calls)
            message["tool_calls"] = [{"type": "function", "function": function} for function in functions]
        return message


@dataclass(frozen=True)
class Rehearsal:
    """The JSON value of a rehearsed response; None when there is an error (JSON's null has no error)."""

    value: Any = None
    error: ParseError | None = None


def is_error_tool_call(value: Any) -> bool:
    """Whether a result says that the call broke the protocol. A refusal of the domain does not, and returns False."""
    return isinstance(value, dict) and ERROR_KEY in value


def parse_tool_calls(text: str | None) -> Turn:
    """Reads the text of one assistant turn, as it comes from a server or a data set (None counts as empty).

    Sampled ids are read with `ChatTokenizer.parse_turn`, which does not mistake text for control ids.
    """
    text = well_formed(text or "").rstrip().removesuffix(TURN_END)
    return read_turn(text, [Tag(m.start(), m.end(), m.group()) for m in _TURN_TAGS.finditer(text)])


def read_turn(text: str, tags: Sequence[Tag]) -> Turn:
    """Reads a turn whose tags (thinking and tool calls, in order of position) are known."""
    outside: list[str] = []
    reasoning: list[str] = []
    calls: list[ToolCall] = []
    call_tags = {tag.start: tag for tag in tags if tag.name in (CALL_OPEN, CALL_CLOSE)}
    error = None
    position = 0  # everything before it has been read
    thinking = False
    for tag in tags:
        if tag.start < position:  # inside the JSON of a call
            continue
        if thinking:
            if tag.name == THINK_CLOSE:
                reasoning.append(text[position : tag.start])
                position, thinking = tag.end, False
        elif tag.name == THINK_CLOSE:
            # Opened in the prompt, as some templates do: what came before was thought, unless there were calls.
            before = text[position : tag.start]
            (outside if calls or reasoning else reasoning).append(before)
            position = tag.end
        elif tag.name == THINK_OPEN:
            outside.append(text[position : tag.start])
            position, thinking = tag.end, True
        elif tag.name == CALL_OPEN:
            outside.append(text[position : tag.start])
            result, position = _read_call(text, tag, call_tags)
            if isinstance(result, ParseError):
                error = result
                break
            calls.append(result)
    else:
        (reasoning if thinking else outside).append(text[position:])
    thoughts = [thought.strip() for thought in reasoning]
    return Turn(
        reasoning="\n".join(thought for thought in thoughts if thought),
        content="".join(outside).strip(),
        calls=() if error else tuple(calls),
        error=error,
    )


def _read_call(text: str, opening: Tag, call_tags: Mapping[int, Tag]) -> tuple[ToolCall | ParseError, int]:
    """The call that `opening` starts, and the position after its closing tag. `call_tags`: by position, in order."""
    place = f"the {CALL_OPEN} at character {opening.start}"
    unclosed = ParseError("UNCLOSED_TAG", f"{place} has no {CALL_CLOSE}; end each call with it")
    try:
        value, end = decode_prefix(text, opening.end)
    except ValueError as reason:
        if not any(tag.name == CALL_CLOSE for tag in call_tags.values() if tag.start >= opening.end):
            return unclosed, len(text)
        return ParseError("MALFORMED_JSON", f"{place} does not hold JSON: {reason}"), len(text)
    end = skip_space(text, end)
    if end in call_tags and call_tags[end].name == CALL_CLOSE:
        return _as_call(value, place), call_tags[end].end
    if next((tag.name for tag in call_tags.values() if tag.start >= end), CALL_OPEN) == CALL_OPEN:
        return unclosed, len(text)
    extra = f"{place} holds more than one JSON object: text at character {end}; write one tag per call"
    return ParseError("MALFORMED_JSON", extra), len(text)


def _as_call(value: Any, place: str) -> ToolCall | ParseError:
    if not isinstance(value, dict):
        return ParseError("MALFORMED_JSON", f"{place} holds {_kind(value)}; write an object with name and arguments")
    name = value.get("name")
    if not isinstance(name, str) or not name.strip():
        return ParseError("MISSING_NAME", f"{place} names no tool: name must be a string that is not blank")
    if "arguments" not in value:
        return ParseError("MISSING_ARGUMENTS", f"{place} ({name}) has no arguments; write {{}} for none")
    arguments = value["arguments"]
    if isinstance(arguments, str):  # encoded once, as the OpenAI format has it
        try:
            arguments = decode(arguments)
        except ValueError as reason:
            return ParseError("INVALID_ARGUMENTS", f"{place} ({name}): arguments are a string without JSON: {reason}")
    if not isinstance(arguments, dict):
        return ParseError("INVALID_ARGUMENTS", f"{place} ({name}): arguments are {_kind(arguments)}, not an object")
    return ToolCall(name, arguments)


def parse_rehearsal(text: str | None, form: Literal["simulator", "inline"] = "simulator") -> Rehearsal:
    """Reads the text of one rehearsed response (None counts as empty).

    `simulator`: a non-empty object or an array between `<execution_result>` tags; text around them is ignored.
    `inline`: any JSON value, up to `</tool_response>` or the end of the text. Thinking is passed over in both.
    Raises ValueError on another form.
    """
    text = well_formed(text or "")
    if form == "simulator":
        return _read_execution_result(text)
    if form == "inline":
        return _read_inline(text)
    raise ValueError(f"world.form is simulator or inline, not {form!r}")


def _failed(code: str, message: str) -> Rehearsal:
    return Rehearsal(error=ParseError(code, message))


def _read_execution_result(text: str) -> Rehearsal:
    thinking = False
    said_something = False
    position = 0
    start = None
    for match in _RESULT_TAGS.finditer(text):
        if not thinking:
            said_something = said_something or bool(text[position : match.start()].strip())
        position = match.end()
        if match.group() == RESULT_OPEN:
            if not thinking:
                start = match.end()
                break
        else:
            thinking = match.group() == THINK_OPEN
    if start is None:
        if not thinking:
            said_something = said_something or bool(text[position:].strip())
        if not said_something:
            return _failed("EMPTY", "the rehearsal holds nothing but thinking or white space")
        return _failed("MISSING_TAG", f"the rehearsal has no {RESULT_OPEN} outside thinking")
    unclosed = f"the {RESULT_OPEN} at character {start - len(RESULT_OPEN)} has no {RESULT_CLOSE}"
    if text.find(RESULT_CLOSE, start) < 0:
        return _failed("UNCLOSED_TAG", unclosed)
    try:
        value, end = decode_prefix(text, start)
    except ValueError as reason:
        return _failed("MALFORMED_JSON", f"the execution result is not JSON: {reason}")
    end = skip_space(text, end)
    if not text.startswith(RESULT_CLOSE, end):
        if text.find(RESULT_CLOSE, end) < 0:  # the one found above is part of a string
            return _failed("UNCLOSED_TAG", unclosed)
        return _failed("MALFORMED_JSON", f"the execution result goes on after its JSON value, at character {end}")
    if not isinstance(value, (dict, list)) or value == {}:
        return _failed("INVALID_RESULT", f"a result is a non-empty object or an array, not {_kind(value)}")
    return Rehearsal(value)


def _read_inline(text: str) -> Rehearsal:
    start = skip_space(text, 0)
    while text.startswith(THINK_OPEN, start):
        closing = text.find(THINK_CLOSE, start)
        start = len(text) if closing < 0 else skip_space(text, closing + len(THINK_CLOSE))
    if start == len(text) or text.startswith(RESPONSE_CLOSE, start):
        return _failed("EMPTY", "the response holds nothing but thinking or white space")
    try:
        value, end = decode_prefix(text, start)
    except ValueError as reason:
        return _failed("MALFORMED_JSON", f"the response is not JSON: {reason}")
    end = skip_space(text, end)
    if end != len(text) and not text.startswith(RESPONSE_CLOSE, end):
        return _failed("MALFORMED_JSON", f"the response goes on after its JSON value, at character {end}")
    return Rehearsal(value)


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if value == {} and isinstance(value, dict):
        return "an empty object"
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    return names.get(type(value), "a number")
