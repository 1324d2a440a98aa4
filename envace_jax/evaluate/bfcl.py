"""Conversations over BFCL's executable classes (`bfcl-eval` on PyPI, Apache-2.0): a stateful world that is not ours.

An entry of a multi-turn category brings a state, user turns and the calls that answer them. The calls are executed
here, one by one, and what the classes really answer is what a rehearser is held against. A rehearser of right calls
alone is never asked about a failure, so each entry ends with one of its calls spoilt until the world refuses it.

The package goes without its dependencies, which are every vendor's SDK:

    pip install --no-deps bfcl-eval mpmath==1.3.0
"""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import json
import pickle
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envace_jax.config import ConfigError
from envace_jax.evaluate.recorded import Conversation

CATEGORIES = ("base", "long_context", "miss_func", "miss_param")
_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}


@dataclass(frozen=True)
class _Made:
    """One executed call. wrote: it changed the state of its object."""

    name: str
    arguments: dict[str, Any]
    response: str
    wrote: bool


def bfcl_conversations(category: str, count: int | None = None, *, seed: int = 0) -> list[Conversation]:
    """The first `count` entries (None: all, 200) of a multi-turn category, as played by the recorded calls.

    Raises ConfigError for an unknown category, or where `bfcl-eval` is not installed.
    """
    if category not in CATEGORIES:
        raise ConfigError(f"BFCL's multi-turn categories are {', '.join(CATEGORIES)}; found {category!r}")
    try:
        import bfcl_eval
        from bfcl_eval.constants import executable_backend_config as backend
    except ImportError as error:
        raise ConfigError("BFCL's classes are not here: pip install --no-deps bfcl-eval mpmath==1.3.0") from error
    data = Path(bfcl_eval.__file__).parent / "data"
    name = f"BFCL_v4_multi_turn_{category}.json"
    entries = _lines(data / name)[:count]
    truths = {line["id"]: line["ground_truth"] for line in _lines(data / "possible_answer" / name)}
    documents = {
        owner: _lines(data / "multi_turn_func_doc" / file)
        for owner, file in backend.MULTI_TURN_FUNC_DOC_FILE_MAPPING.items()
    }
    played = []
    for entry in entries:
        owners = entry["involved_classes"]
        objects = [_begin(backend, owner, entry["initial_config"], category == "long_context") for owner in owners]
        tools = [_tool(document) for owner in owners for document in documents[owner]]
        rng = random.Random(f"bfcl/{seed}/{entry['id']}")
        played.append((play_entry(objects, entry["question"], truths[entry["id"]], rng), tools))
    writes = frozenset(made.name for (_, calls), _ in played for made in calls if made.wrote)
    return [Conversation(messages, tools, writes) for (messages, _), tools in played]


def play_entry(
    objects: Sequence[Any], turns: Sequence[Sequence[Mapping[str, str]]], truth: Sequence[Sequence[str]], rng: Any
) -> tuple[list[dict[str, Any]], list[_Made]]:
    """The conversation of an entry and all calls made: user turns, recorded calls one by one, and one that must fail.

    objects: instances whose public methods are the tools. truth: of each turn the calls, as Python expressions.
    """
    methods: dict[str, Callable[..., Any]] = {}
    for thing in objects:
        members = inspect.getmembers(thing, predicate=inspect.ismethod)
        methods |= {name: method for name, method in members if not name.startswith("_")}
    messages: list[dict[str, Any]] = []
    calls: list[_Made] = []
    for turn, expressions in zip(turns, truth, strict=True):
        messages += [dict(message) for message in turn]
        for expression in expressions:
            calls.append(_execute(methods, *read_call(expression, methods)))
            messages += _said(calls[-1])
    spoilt = _spoil(methods, calls, rng)
    if spoilt is not None:
        calls.append(spoilt)
        messages += _said(spoilt)
    return messages, calls


def read_call(expression: str, methods: Mapping[str, Callable[..., Any]]) -> tuple[str, dict[str, Any]]:
    """Name and arguments of `f(1, b='x')`, positional ones under their names. Raises ValueError for anything else."""
    node = ast.parse(expression.strip(), mode="eval").body
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in methods:
        raise ValueError(f"{expression!r} is not the call of a known function")
    given = [ast.literal_eval(value) for value in node.args]
    named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
    return node.func.id, dict(inspect.signature(methods[node.func.id]).bind(*given, **named).arguments)


def _execute(methods: Mapping[str, Callable[..., Any]], name: str, arguments: Mapping[str, Any]) -> _Made:
    method = methods[name]
    before = _state(method)
    try:
        result = method(**copy.deepcopy(dict(arguments)))
    except Exception as error:  # the classes fail in any way, and the benchmark shows that to the model
        response = f"Error during execution: {error}"
    else:
        response = result if isinstance(result, str) else _text(result)
    return _Made(name, dict(arguments), response, _state(method) != before)


def _text(result: Any) -> str:
    if isinstance(result, dict):
        try:
            return json.dumps(result)
        except TypeError:
            pass
    return str(result)


def _state(method: Callable[..., Any]) -> bytes:
    try:
        return pickle.dumps(vars(method.__self__))
    except (TypeError, AttributeError, pickle.PicklingError):
        return repr(vars(method.__self__)).encode()


def _spoil(methods: Mapping[str, Callable[..., Any]], calls: Iterable[_Made], rng: Any) -> _Made | None:
    """One of the calls, with a name in it that nothing has, which the world answers by an error; None: none is."""
    candidates = [(made, key) for made in calls for key, value in made.arguments.items() if isinstance(value, str)]
    rng.shuffle(candidates)
    for made, key in candidates:
        tried = _execute(methods, made.name, {**made.arguments, key: f"missing_{rng.randrange(1000)}"})
        if not tried.wrote and "error" in tried.response.lower():
            return tried
    return None


def _said(made: _Made) -> list[dict[str, Any]]:
    function = {"name": made.name, "arguments": json.dumps(made.arguments, ensure_ascii=False)}
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    return [call, {"role": "tool", "content": made.response}]


def _begin(backend: Any, owner: str, config: Mapping[str, Any], long_context: bool) -> Any:
    thing = getattr(importlib.import_module(backend.CLASS_FILE_PATH_MAPPING[owner]), owner)()
    if owner not in backend.STATELESS_CLASSES:
        thing._load_scenario(copy.deepcopy(config.get(owner, {})), long_context=long_context)
    return thing


def _tool(document: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": document["name"], "description": document["description"]}
    return {"type": "function", "function": function | {"parameters": _schema(document["parameters"])}}


def _schema(node: Any) -> Any:
    """A JSON schema: the package's own has Python's names for some types."""
    if isinstance(node, list):
        return [_schema(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: _TYPES.get(value, value) if key == "type" and isinstance(value, str) else _schema(value)
        for key, value in node.items()
    }


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
