"""How like a predicted tool response is to the real one: pure functions of two texts.

A response is JSON where it parses as JSON, else text. Paths drop list indices (`.a[].b`), so that a list is compared
as a multiset; values are compared as lower-cased text with white space squeezed; empty containers hold no value.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

MEASURES = ("exact_match", "error_agreement", "schema_f1", "value_f1", "token_f1")
_BRACKETS = re.compile(r'[{}\[\]",:]')


def score_response(predicted: str | None, real: str) -> dict[str, float]:
    """Each of `MEASURES`, in 0..1. None stands for no prediction at all, which scores 0 throughout.

    exact_match: equal as JSON (true is not 1), or equal text after lower-casing and squeezing white space.
    error_agreement: both are errors or neither is.
    schema_f1, value_f1: over the multisets of (path, type) and (path, value); token_f1: over words, brackets aside.
    """
    if predicted is None:
        return dict.fromkeys(MEASURES, 0.0)
    found, wanted = read_response(predicted), read_response(real)
    both_json = not isinstance(found, Text) and not isinstance(wanted, Text)
    exact = (both_json and _canonical(found) == _canonical(wanted)) or squeeze(predicted) == squeeze(real)
    ours, theirs = list(leaves(found)), list(leaves(wanted))
    return {
        "exact_match": float(exact),
        "error_agreement": float(is_error(predicted) == is_error(real)),
        "schema_f1": multiset_f1(((p, _kind(v)) for p, v in ours), ((p, _kind(v)) for p, v in theirs)),
        "value_f1": multiset_f1(((p, _spelled(v)) for p, v in ours), ((p, _spelled(v)) for p, v in theirs)),
        "token_f1": multiset_f1(_words(predicted), _words(real)),
    }


def mean_scores(scores: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean over calls of each measure, in percent; without calls, nothing."""
    return {m: 100 * math.fsum(s[m] for s in scores) / len(scores) for m in MEASURES} if scores else {}


class Text(str):
    """A response that is not JSON."""


def read_response(text: str) -> Any:
    """The JSON value of a response, or the response itself as `Text`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return Text(text)


def is_error(response: str) -> bool:
    """Whether a response reports a failure: an object with `error` or `error_tool_call`, or text that opens so."""
    value = read_response(response)
    if isinstance(value, dict):
        return bool(value.keys() & {"error", "error_tool_call"})
    return isinstance(value, str) and value.strip().lower().startswith("error")


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, scalar) of everything a JSON value holds; a text is one scalar at the empty path."""
    stack = [(path, value)]
    while stack:
        path, value = stack.pop()
        if isinstance(value, dict):
            stack += [(f"{path}.{key}", item) for key, item in value.items()]
        elif isinstance(value, list):
            stack += [(f"{path}[]", item) for item in value]
        else:
            yield path, value


def multiset_f1(a: Iterable[Any], b: Iterable[Any]) -> float:
    """Harmonic mean of precision and recall of two multisets; 1 where both are empty."""
    a, b = Counter(a), Counter(b)
    total = a.total() + b.total()
    return 2 * (a & b).total() / total if total else 1.0


def squeeze(text: str) -> str:
    """Lower-cased, runs of white space as one space, none at the ends."""
    return " ".join(text.lower().split())


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _kind(value: Any) -> str:
    return "string" if isinstance(value, str) else type(value).__name__


def _spelled(value: Any) -> str:
    return squeeze(value if isinstance(value, str) else json.dumps(value))


def _words(text: str) -> list[str]:
    return _BRACKETS.sub(" ", text.lower()).split()
