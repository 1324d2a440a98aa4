"""JSON as RFC 8259 has it, read from the front of a text, without a way to crash the reader.

Python's own decoder accepts `NaN`, overflows `1e999` to infinity, recurses as deep as the text nests, and keeps lone
surrogates that no UTF-8 file can hold. Text sampled from a model contains all of these sooner or later.
"""

import json
import math
import re
from typing import Any, NoReturn

MAX_DEPTH = 256  # far beyond any tool's schema, far below Python's recursion limit, and the same on every version

_SURROGATE = re.compile("[\ud800-\udfff]")
# An unterminated string runs to the end of the text: one match, so that the scan stays linear.
_STRUCTURE = re.compile(r'"(?:[^"\\]|\\.)*"?|[\[\]{}]', re.DOTALL)
_SPACE = re.compile(r"\s*")


def skip_space(text: str, start: int) -> int:
    """First position at or after `start` that is not white space."""
    return _SPACE.match(text, start).end()


def well_formed(text: str) -> str:
    """The text with lone surrogates replaced by U+FFFD; split pairs are joined."""
    if not _SURROGATE.search(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def decode_prefix(text: str, start: int = 0) -> tuple[Any, int]:
    """Reads one JSON value that begins at `start` (white space before it is skipped).

    Returns the value and the position after it. Lone surrogates in strings and keys become U+FFFD; of equal keys the
    last one counts. Raises ValueError with the reason for anything that is not JSON, for numbers that no float holds,
    and for nesting beyond `MAX_DEPTH`.
    """
    start = skip_space(text, start)
    if start == len(text):
        raise ValueError("nothing where a JSON value should be")
    _check_depth(text, start)
    value, end = _DECODER.raw_decode(text, start)
    if "\\u" in text[start:end] or _SURROGATE.search(text, start, end):
        value = _well_formed_value(value)
    return value, end


def decode(text: str) -> Any:
    """Reads a text that is one JSON value and nothing else. Raises ValueError as `decode_prefix` does."""
    value, end = decode_prefix(text)
    if skip_space(text, end) != len(text):
        raise ValueError(f"text after the JSON value, at character {end}")
    return value


def _check_depth(text: str, start: int) -> None:
    if text.count("[", start) + text.count("{", start) <= MAX_DEPTH:
        return
    depth = 0
    for match in _STRUCTURE.finditer(text, start):
        mark = match.group()
        if mark in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise ValueError(f"nested deeper than {MAX_DEPTH} levels, at character {match.start()}")
        elif mark in "]}":
            depth -= 1
            if depth <= 0:
                return


def _well_formed_value(value: Any) -> Any:
    if isinstance(value, str):
        return well_formed(value)
    if isinstance(value, list):
        return [_well_formed_value(item) for item in value]
    if isinstance(value, dict):
        return {well_formed(key): _well_formed_value(item) for key, item in value.items()}
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite_float(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:40]} is too large for a float")
    return number


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite_float)
