"""What messages and tools must look like, value by value; a wrong one is a `Fault` that says where and what.

Every check takes any value at all: what comes from a file may be null, a number or a list wherever an object should
stand, nested deeper than a program can follow, or JSON text that is not JSON.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

import jsonschema

ROLES = ("system", "user", "assistant", "tool")
MAX_DEPTH = 64  # deeper than any tool's schema, and shallow enough for every program downstream


class Fault(ValueError):
    """What is wrong with a value, without the place of its record."""


def require(condition: Any, message: str) -> None:
    """Raises `Fault` unless the condition holds."""
    if not condition:
        raise Fault(message)


def require_text(value: Any, place: str) -> None:
    """Raises `Fault` unless the value is text with something in it."""
    require(isinstance(value, str), f"{place} must be text, found {_kind(value)}")
    require(value.strip(), f"{place} is empty")


def require_list(value: Any, place: str) -> tuple[Any, ...]:
    """The entries of an optional list; null is an empty one."""
    require(value is None or isinstance(value, list | tuple), f"{place} must be a list, found {_kind(value)}")
    return tuple(value or ())


def check_depth(value: Any, place: str) -> None:
    """Raises `Fault` when the value nests deeper than `MAX_DEPTH`."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, Mapping | list | tuple)
            for inner in (outer.values() if isinstance(outer, Mapping) else outer)
        ]
        if not level:
            return
    raise Fault(f"{place} is nested deeper than {MAX_DEPTH} levels")


def decode_json(text: str, place: str) -> Any:
    """The value of a JSON text. NaN, infinities and text that is no JSON are a `Fault`."""
    try:
        return json.loads(text, parse_constant=refuse_constant)
    except RecursionError:
        raise Fault(f"{place} is nested too deep") from None
    except ValueError as error:
        raise Fault(f"{place} is not JSON ({error})") from None


def refuse_constant(name: str) -> None:
    """For `json`'s parse_constant: NaN and the infinities are not JSON."""
    raise ValueError(f"{name} is not a JSON number")


def check_messages(messages: list[Any]) -> tuple[Mapping[str, Any], ...]:
    """A recorded conversation, its messages reduced to what the format knows; keys that are null are left out.

    Raises `Fault` naming the message: a role that is none, content that is no text, a call of the wrong shape or whose
    arguments are not a JSON object, a result without a call before it, a system message that is not the first.
    """
    clean: list[Mapping[str, Any]] = []
    unanswered: list[Any] = []  # ids of the calls that still wait for a result
    for i, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        require(role in ROLES, f"message {i} must be an object with role system, user, assistant or tool")
        place = f"message {i} ({role})"
        calls = message.get("tool_calls")
        if role == "assistant":
            unanswered = check_calls(calls, place)
        else:
            require(not calls, f"{place} must not have tool_calls")
        content = message.get("content")
        if content is None and role == "assistant" and unanswered:
            content = ""
        require(isinstance(content, str), f"{place} must have text content, found {_kind(content)}")
        require(role != "system" or i == 0, f"{place}: a system message must be the first")
        if role == "tool":
            _answer(unanswered, message.get("tool_call_id"), i)
        elif role != "assistant":
            unanswered = []
        entry: dict[str, Any] = {"role": role, "content": content}
        for key in ("reasoning_content", "tool_call_id", "name"):
            if message.get(key) is not None:
                require(isinstance(message[key], str), f"{place}: {key} must be text, found {_kind(message[key])}")
                entry[key] = message[key]
        if calls:
            entry["tool_calls"] = [_call(call) for call in calls]
        clean.append(entry)
    require(any(m["role"] == "user" for m in clean), "the conversation has no user message")
    return tuple(clean)


def _answer(unanswered: list[Any], answered: Any, i: int) -> None:
    """Takes the call that a result answers from the list: the one it names, or the next."""
    require(unanswered, f"message {i} is a tool result without a call before it")
    named = all(isinstance(call, str) for call in unanswered) and isinstance(answered, str)
    require(not named or answered in unanswered, f"message {i} is a tool result without a call {answered!r} before it")
    unanswered.pop(unanswered.index(answered) if named else 0)


def check_calls(calls: Any, place: str) -> list[Any]:
    """The ids (None where a call has none) of an assistant message's calls, which must be of the right shape."""
    ids = []
    for c, call in enumerate(require_list(calls, f"{place}: tool_calls")):
        where = f"{place}, call {c}"
        require(isinstance(call, Mapping), f"{where} must be an object, found {_kind(call)}")
        function = call.get("function")
        require(isinstance(function, Mapping), f"{where}: function must be an object, found {_kind(function)}")
        require_text(function.get("name"), f"{where}: the function's name")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = decode_json(arguments, f"{where}: arguments")
        require(isinstance(arguments, Mapping), f"{where}: arguments must be a JSON object, found {_kind(arguments)}")
        check_depth(arguments, f"{where}: arguments")
        require(isinstance(call.get("id"), str | None), f"{where}: id must be text")
        ids.append(call.get("id"))
    return ids


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    made = {"type": "function", "function": {"name": call["function"]["name"], "arguments": arguments}}
    return made if call.get("id") is None else {"id": call["id"], **made}


def check_tools(tools: list[Any]) -> None:
    """Raises `Fault` unless every tool is `{"type": "function", "function": {name, description?, parameters?}}`, with
    parameters that are a JSON schema of an object."""
    for t, tool in enumerate(tools):
        place = f"tool {t}"
        require(isinstance(tool, Mapping), f"{place} must be an object, found {_kind(tool)}")
        require(tool.get("type") == "function", f"{place} must have type 'function', found {tool.get('type')!r}")
        function = tool.get("function")
        require(isinstance(function, Mapping), f"{place}: function must be an object, found {_kind(function)}")
        require_text(function.get("name"), f"{place}: the function's name")
        place = f"{place} ({function['name']})"
        description = function.get("description")
        require(isinstance(description, str | None), f"{place}: description must be text, found {_kind(description)}")
        check_depth(tool, place)
        parameters = function.get("parameters")
        if parameters is None:
            continue
        require(isinstance(parameters, Mapping), f"{place}: parameters must be an object, found {_kind(parameters)}")
        require(
            parameters.get("type", "object") == "object",
            f"{place}: parameters must have type 'object', found {parameters.get('type')!r}",
        )
        error = _schema_error(json.dumps(parameters, sort_keys=True))
        require(error is None, f"{place}: parameters are not a valid JSON schema: {error}")


@functools.lru_cache(maxsize=4096)  # the same tools come back in task after task
def _schema_error(text: str) -> str | None:
    schema = json.loads(text)
    try:
        jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator).check_schema(schema)
        return _lost_reference(schema, schema)
    except jsonschema.SchemaError as error:
        return f"{error.message} at {'/'.join(map(str, error.absolute_path)) or 'the top'}"
    except Exception as error:  # a $schema of the wrong kind, say: whatever the library makes of it
        return f"{type(error).__name__}: {error}"


def _lost_reference(value: Any, root: Mapping[str, Any]) -> str | None:
    """What a local `$ref` points to must be there: a validator would only notice at the first call."""
    if isinstance(value, list):
        return next(filter(None, (_lost_reference(inner, root) for inner in value)), None)
    if not isinstance(value, Mapping):
        return None
    reference = value.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/") and "$id" not in root:
        target: Any = root
        for part in reference[2:].split("/"):
            part = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(target, list):
                target = target[int(part)] if part.isdecimal() and int(part) < len(target) else None
            else:
                target = target.get(part) if isinstance(target, Mapping) else None
        if target is None:
            return f"$ref {reference!r} leads nowhere"
    return next(filter(None, (_lost_reference(inner, root) for inner in value.values())), None)


def _kind(value: Any) -> str:
    return type(value).__name__
