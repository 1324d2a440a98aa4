"""What a rehearser has to beat: answers that need no model, only the other recorded calls.

`nearest` gives the response of the most similar call of the same tool, `commonest` the most frequent response of that
tool. Both look at other entries only, so that no call answers itself or is answered from its own conversation.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envace_jax.errors import ConfigError
from envace_jax.evaluate.metrics import mean_scores, multiset_f1, score_response

_SPACED = str.maketrans("(),", "   ")


@dataclass(frozen=True)
class RecordedCall:
    """One call and its real response. `entry`: the conversation it stands in; `category`: what it is counted under."""

    category: str
    entry: str
    name: str
    call: str
    response: str


def read_calls(path: str | Path) -> list[RecordedCall]:
    """The calls of a JSON list or of JSON lines, in file order.

    Records are `cat, id, call, response` (the call as `name(key=value)`), `domain, task, name, arguments, content`, or
    `call, response` with the call as `{"name", "arguments"}`, where `category` and `entry` are optional.
    Raises ConfigError naming the file and the record.
    """
    return [_recorded(record, f"{path}, record {i}", str(i)) for i, record in enumerate(read_records(path))]


def read_records(path: str | Path) -> list[Mapping[str, Any]]:
    """The objects of a JSON list or of JSON lines. Raises ConfigError naming the file and the line."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if text.lstrip().startswith("["):
        parts = [(1, text)]
    else:
        parts = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    records: list[Any] = []
    for number, part in parts:
        try:
            value = json.loads(part)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}, line {number}: not JSON: {error}") from error
        records += value if isinstance(value, list) else [value]
    wrong = next((i for i, record in enumerate(records) if not isinstance(record, dict)), None)
    if wrong is not None:
        raise ConfigError(f"{path}, record {wrong}: must be an object, found {type(records[wrong]).__name__}")
    if not records:
        raise ConfigError(f"{path} holds no record")
    return records


def floors(calls: Sequence[RecordedCall]) -> dict[str, dict[str, float]]:
    """Measures in percent by floor, `nearest` and `commonest`; a call without a counterpart scores 0."""
    by_name: dict[str, list[int]] = defaultdict(list)
    for i, call in enumerate(calls):
        by_name[call.name].append(i)
    nearest: list[str | None] = [None] * len(calls)
    commonest: list[str | None] = [None] * len(calls)
    for chosen in by_name.values():
        words = {calls[i].call: Counter(call_words(calls[i].call)) for i in chosen}
        for i in chosen:
            others = [j for j in chosen if calls[j].entry != calls[i].entry]
            if others:
                alike = {
                    text: multiset_f1(words[calls[i].call], words[text]) for text in {calls[j].call for j in others}
                }
                # `max` keeps the first of equals, and the most common of `Counter` is the first of equals too.
                nearest[i] = calls[max(others, key=lambda j: alike[calls[j].call])].response
                commonest[i] = Counter(calls[j].response for j in others).most_common(1)[0][0]
    found = {"nearest": nearest, "commonest": commonest}
    return {
        name: mean_scores([score_response(p, call.response) for p, call in zip(predictions, calls, strict=True)])
        for name, predictions in found.items()
    }


def call_words(call: str) -> list[str]:
    """The words two calls are compared by: lower-cased, `(` `)` `,` as spaces."""
    return call.lower().translate(_SPACED).split()


def spell_call(name: str, arguments: Any) -> str:
    """A call as text: `name(arguments as JSON)`."""
    return f"{name}({arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)})"


def by_category(calls: Iterable[RecordedCall]) -> dict[str, list[RecordedCall]]:
    """The calls of each category, categories in the order in which they first come."""
    out: dict[str, list[RecordedCall]] = {}
    for call in calls:
        out.setdefault(call.category, []).append(call)
    return out


def _recorded(record: Mapping[str, Any], where: str, number: str) -> RecordedCall:
    try:
        if "domain" in record:
            name, call = record["name"], spell_call(record["name"], record["arguments"])
            found = record["domain"], record["task"], name, call, record["content"]
        elif isinstance(record["call"], str):
            call = record["call"]
            found = record.get("cat", "all"), record.get("id", number), call.partition("(")[0], call, record["response"]
        else:
            name, call = record["call"]["name"], spell_call(**_picked(record["call"]))
            response = record["response"]
            response = response if isinstance(response, str) else json.dumps(response, ensure_ascii=False)
            found = record.get("category", "all"), record.get("entry", number), name, call, response
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"{where}: a call needs its name, arguments and response, {error} is missing or odd"
        ) from None
    if not all(isinstance(part, str) for part in (*found[2:],)):
        raise ConfigError(f"{where}: name, call and response must be text")
    return RecordedCall(str(found[0]), str(found[1]), *found[2:])


def _picked(call: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": call["name"], "arguments": call["arguments"]}
