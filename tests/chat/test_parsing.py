"""What a turn and a rehearsal mean, case by case; and that no text at all can raise."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envace_jax.chat import ParseError, ToolCall, Turn, is_error_tool_call, parse_rehearsal, parse_tool_calls


def call(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def code(result) -> str | None:
    return result.error.code if result.error else None


def test_shared_cases_of_turns(shared_dir):
    for case in json.loads((shared_dir / "cases" / "tool_calls.json").read_text(encoding="utf-8")):
        turn = parse_tool_calls(case["text"])
        calls = [{"name": made.name, "arguments": made.arguments} for made in turn.calls]
        assert (case["name"], code(turn), calls) == (case["name"], case["error"], case["calls"])
        for part in {"content", "reasoning"} & case.keys():
            assert getattr(turn, part) == case[part], case["name"]


def test_shared_cases_of_rehearsals(shared_dir):
    for case in json.loads((shared_dir / "cases" / "rehearsal_results.json").read_text(encoding="utf-8")):
        result = parse_rehearsal(case["text"], case.get("form", "simulator"))
        assert (case["name"], code(result), result.value) == (case["name"], case["error"], case.get("value"))


CALLS = {
    "braces in strings": ('{"name": "f", "arguments": {"q": "}{]["}}', {"q": "}{]["}),
    "escaped quotes": (r'{"name": "f", "arguments": {"q": "\"}\\"}}', {"q": '"}\\'}),
    "nested": ('{"name": "f", "arguments": {"a": {"b": {"c": [{}, [[]]]}}}}', {"a": {"b": {"c": [{}, [[]]]}}}),
    "key order": ('{"arguments": {"x": 1}, "name": "f"}', {"x": 1}),
    "unknown key beside": ('{"id": 7, "name": "f", "arguments": {}}', {}),
    "spread over lines": ('{\r\n  "name": "f",\r\n\t"arguments": {\r\n}\r\n}\r\n', {}),
    "last of equal keys": ('{"name": "f", "arguments": {"x": 1, "x": 2}}', {"x": 2}),
    "surrogate pair": (r'{"name": "f", "arguments": {"e": "\ud83d\ude84"}}', {"e": "🚄"}),
    "surrogates the wrong way round": (r'{"name": "f", "arguments": {"e": "\ude84\ud83d"}}', {"e": "\ufffd\ufffd"}),
    "surrogate in a key": (r'{"name": "f", "arguments": {"\udc00": [1]}}', {"\ufffd": [1]}),
    "raw surrogate": ('{"name": "f", "arguments": {"e": "\ud800"}}', {"e": "\ufffd"}),
    "escaped backslash before u": (r'{"name": "f", "arguments": {"e": "\\ud800"}}', {"e": "\\ud800"}),
    "opening tag in a string": ('{"name": "f", "arguments": {"q": "<tool_call>"}}', {"q": "<tool_call>"}),
    "thinking tag in a string": ('{"name": "f", "arguments": {"q": "<think>"}}', {"q": "<think>"}),
    "large integer": ('{"name": "f", "arguments": {"n": ' + "9" * 400 + "}}", {"n": int("9" * 400)}),
    "arguments as a string in white space": (r'{"name": "f", "arguments": " {\"a\": 1}\n "}', {"a": 1}),
    "sixty levels": ('{"name": "f", "arguments": {"a": ' + "[" * 60 + "]" * 60 + "}}", None),
}


@pytest.mark.parametrize("body, arguments", CALLS.values(), ids=CALLS)
def test_a_call_is_one_json_object_in_its_tag(body, arguments):
    turn = parse_tool_calls(call(body))
    assert turn.error is None
    assert [made.name for made in turn.calls] == ["f"]
    if arguments is not None:
        assert turn.calls[0].arguments == arguments


BAD_CALLS = {
    "parameters instead of arguments": ('{"name": "f", "parameters": {}}', "MISSING_ARGUMENTS"),
    "wrong case of the key": ('{"name": "f", "Arguments": {}}', "MISSING_ARGUMENTS"),
    "null arguments": ('{"name": "f", "arguments": null}', "INVALID_ARGUMENTS"),
    "boolean arguments": ('{"name": "f", "arguments": true}', "INVALID_ARGUMENTS"),
    "string without JSON": ('{"name": "f", "arguments": "a=1"}', "INVALID_ARGUMENTS"),
    "empty string": ('{"name": "f", "arguments": ""}', "INVALID_ARGUMENTS"),
    "string of an array": ('{"name": "f", "arguments": "[1]"}', "INVALID_ARGUMENTS"),
    "string with NaN": ('{"name": "f", "arguments": "{\\"x\\": NaN}"}', "INVALID_ARGUMENTS"),
    "encoded twice": (json.dumps({"name": "f", "arguments": json.dumps(json.dumps({"a": 1}))}), "INVALID_ARGUMENTS"),
    "string nested too deep": (json.dumps({"name": "f", "arguments": "[" * 9000 + "]" * 9000}), "INVALID_ARGUMENTS"),
    "name null": ('{"name": null, "arguments": {}}', "MISSING_NAME"),
    "name a number": ('{"name": 3, "arguments": {}}', "MISSING_NAME"),
    "name an object": ('{"name": {"f": 1}, "arguments": {}}', "MISSING_NAME"),
    "name empty": ('{"name": "", "arguments": {}}', "MISSING_NAME"),
    "name a line break": ('{"name": "\\n\\u3000", "arguments": {}}', "MISSING_NAME"),
    "empty object": ("{}", "MISSING_NAME"),
    "OpenAI's wrapper": ('{"type": "function", "function": {"name": "f", "arguments": {}}}', "MISSING_NAME"),
    "array of calls": ('[{"name": "f", "arguments": {}}]', "MALFORMED_JSON"),
    "a string": ('"f"', "MALFORMED_JSON"),
    "null": ("null", "MALFORMED_JSON"),
    "Infinity": ('{"name": "f", "arguments": {"x": Infinity}}', "MALFORMED_JSON"),
    "minus Infinity": ('{"name": "f", "arguments": {"x": -Infinity}}', "MALFORMED_JSON"),
    "a number no float holds": ('{"name": "f", "arguments": {"x": 1e999}}', "MALFORMED_JSON"),
    "an integer Python refuses": ('{"name": "f", "arguments": {"x": ' + "1" * 5000 + "}}", "MALFORMED_JSON"),
    "single quotes": ("{'name': 'f', 'arguments': {}}", "MALFORMED_JSON"),
    "trailing comma": ('{"name": "f", "arguments": {},}', "MALFORMED_JSON"),
    "comment": ('{"name": "f", "arguments": {}} // go', "MALFORMED_JSON"),
    "words before": ('call: {"name": "f", "arguments": {}}', "MALFORMED_JSON"),
    "code fence": ('```json\n{"name": "f", "arguments": {}}\n```', "MALFORMED_JSON"),
    "a brace too many": ('{"name": "f", "arguments": {}}}', "MALFORMED_JSON"),
    "a brace too few": ('{"name": "f", "arguments": {}', "MALFORMED_JSON"),
    "byte order mark": ('\ufeff{"name": "f", "arguments": {}}', "MALFORMED_JSON"),
    "raw tab in a string": ('{"name": "f", "arguments": {"q": "a\tb"}}', "MALFORMED_JSON"),
    "bad escape": (r'{"name": "f", "arguments": {"q": "\x41"}}', "MALFORMED_JSON"),
    "objects nested too deep": ('{"a":' * 30000, "MALFORMED_JSON"),
    "tag opened twice": ('<tool_call>\n{"name": "f", "arguments": {}}', "MALFORMED_JSON"),
    "thought inside the tag": ('<think>\nhm\n</think>\n{"name": "f", "arguments": {}}', "MALFORMED_JSON"),
}


@pytest.mark.parametrize("body, expected", BAD_CALLS.values(), ids=BAD_CALLS)
def test_a_bad_call_is_an_error_with_its_code(body, expected):
    turn = parse_tool_calls(call('{"name": "good", "arguments": {}}') + "\n" + call(body))
    assert (code(turn), turn.calls) == (expected, ())
    assert turn.error.message


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        '<tool_call>\n{"name": "f", "arguments": {}}',
        '<tool_call>\n{"name": "f", "arguments": {"q": "a',
        '<tool_call>\n{"name": "f", "arguments": {}}\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": {"q": "</tool_call>"}}',
    ],
)
def test_a_call_needs_its_closing_tag(text):
    assert code(parse_tool_calls(text)) == "UNCLOSED_TAG"


@pytest.mark.parametrize(
    "text, expected",
    [
        ("", Turn()),
        (None, Turn()),
        ("plain\r\n", Turn(content="plain")),
        ("plain<|im_end|>\n", Turn(content="plain")),
        ("<TOOL_CALL>{}</TOOL_CALL>", Turn(content="<TOOL_CALL>{}</TOOL_CALL>")),
        ("so </tool_call> it is", Turn(content="so </tool_call> it is")),
        ("<think>\n\n</think>\n\nhi", Turn(content="hi")),
        ("<think>a</think>mid<think>b</think>end", Turn("a\nb", "midend")),
        ("<think>a<think>b</think>c", Turn("a<think>b", "c")),
        ("opened in the prompt</think>\n\nhi", Turn("opened in the prompt", "hi")),
        ("<think>a</think>b</think>c", Turn("a", "bc")),
        ("<think>only", Turn("only")),
        ("hi<think>" + call('{"name": "f", "arguments": {}}'), Turn(call('{"name": "f", "arguments": {}}'), "hi")),
    ],
)
def test_thinking_and_content_without_calls(text, expected):
    assert parse_tool_calls(text) == expected


def test_calls_before_between_and_after_text_and_thought():
    text = (
        "one "
        + call('{"name": "f", "arguments": {"q": "</think><think>"}}')
        + "two"
        + "<think>three"
        + call('{"name": "no", "arguments": {}}')
        + "</think>"
        + call('{"name": "g", "arguments": {}}')
        + " four"
    )
    turn = parse_tool_calls(text)
    assert [made.name for made in turn.calls] == ["f", "g"]
    assert turn.content == "one two four"
    assert turn.reasoning == "three" + call('{"name": "no", "arguments": {}}')


def test_many_calls_are_read_in_reasonable_time():
    assert len(parse_tool_calls(call('{"name": "f", "arguments": {}}') * 3000).calls) == 3000


def test_a_turn_as_a_message():
    turn = Turn("why", "text", (ToolCall("f", {"a": 1}),))
    assert turn.message() == {
        "role": "assistant",
        "content": "text",
        "reasoning_content": "why",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
    }
    assert Turn(content="bye").message() == {"role": "assistant", "content": "bye"}


SIMULATED = {
    "text around": ('Here:\n<execution_result>{"a": 1}</execution_result> done', {"a": 1}),
    "tags inside strings": (
        '<execution_result>{"q": "</execution_result><think>x</think>"}</execution_result>',
        {"q": "</execution_result><think>x</think>"},
    ),
    "the first of two": ("<execution_result>[1]</execution_result><execution_result>[2]</execution_result>", [1]),
    "thought after text": ("ok <think><execution_result>[1]</execution_result></think><execution_result>[2]"
                           "</execution_result>", [2]),
    "array of scalars": ("<execution_result>\n[1, null]\n</execution_result>", [1, None]),
    "lone surrogate": ('<execution_result>["\\udc00"]</execution_result>', ["\ufffd"]),
}  # fmt: skip
BAD_SIMULATED = {
    "white space": (" \n\t", "EMPTY"),
    "thought only": ("<think>\nhm\n</think>\n", "EMPTY"),
    "unclosed thought": ('<think>\n<execution_result>{"a": 1}</execution_result>', "EMPTY"),
    "text then unclosed thought": ("hm <think> <execution_result>[1]</execution_result>", "MISSING_TAG"),
    "closing tag alone": ('{"a": 1}</execution_result>', "MISSING_TAG"),
    "wrong case": ('<Execution_Result>{"a": 1}</Execution_Result>', "MISSING_TAG"),
    "closed only in a string": ('<execution_result>{"q": "</execution_result>"}', "UNCLOSED_TAG"),
    "nothing inside": ("<execution_result>\n\n</execution_result>", "MALFORMED_JSON"),
    "two values": ('<execution_result>{"a": 1}{"b": 2}</execution_result>', "MALFORMED_JSON"),
    "code fence": ('<execution_result>```{"a": 1}```</execution_result>', "MALFORMED_JSON"),
    "NaN": ('<execution_result>{"a": NaN}</execution_result>', "MALFORMED_JSON"),
    "too deep": ("<execution_result>" + "[" * 9999 + "]" * 9999 + "</execution_result>", "MALFORMED_JSON"),
    "null": ("<execution_result>null</execution_result>", "INVALID_RESULT"),
    "string": ('<execution_result>"ok"</execution_result>', "INVALID_RESULT"),
    "boolean": ("<execution_result>false</execution_result>", "INVALID_RESULT"),
}
INLINE = {
    "null": ("null\n</tool_response>", None),
    "false": ("false", False),
    "text after the closing tag": ('{"a": 1}</tool_response><|im_end|>', {"a": 1}),
    "closing tag in a string": ('{"q": "</tool_response>"}\n</tool_response>', {"q": "</tool_response>"}),
    "thinking tags in a string": ('"<think>x</think>"', "<think>x</think>"),
    "two thoughts": ("<think>a</think>\n<think>b</think>\n[]", []),
    "white space that is not JSON's": ("\u00a0 [1] \u2028", [1]),
    "declared error": (
        '{"error_tool_call": {"code": "X", "message": "m"}}',
        {"error_tool_call": {"code": "X", "message": "m"}},
    ),
}
BAD_INLINE = {
    "nothing": ("", "EMPTY"),
    "thought only": ("<think>x</think></tool_response>", "EMPTY"),
    "unclosed thought": ('<think>x {"a": 1}\n</tool_response>', "EMPTY"),
    "two values": ("1 2", "MALFORMED_JSON"),
    "thought after": ("{}<think>x</think>", "MALFORMED_JSON"),
    "cut off": ('{"a": [1', "MALFORMED_JSON"),
    "byte order mark": ("\ufeff{}", "MALFORMED_JSON"),
    "too large": ("1e999", "MALFORMED_JSON"),
    "too deep": ("[" * 100000, "MALFORMED_JSON"),
}


@pytest.mark.parametrize(
    "form, text, value",
    [("simulator", *case) for case in SIMULATED.values()] + [("inline", *case) for case in INLINE.values()],
    ids=[*SIMULATED, *(f"inline {name}" for name in INLINE)],
)
def test_a_rehearsed_value(form, text, value):
    result = parse_rehearsal(text, form)
    assert result.error is None
    assert result.value == value and type(result.value) is type(value)


@pytest.mark.parametrize(
    "form, text, expected",
    [("simulator", *case) for case in BAD_SIMULATED.values()] + [("inline", *case) for case in BAD_INLINE.values()],
    ids=[*BAD_SIMULATED, *(f"inline {name}" for name in BAD_INLINE)],
)
def test_a_rehearsal_that_is_none(form, text, expected):
    result = parse_rehearsal(text, form)
    assert (code(result), result.value) == (expected, None)


def test_a_third_form_is_refused():
    with pytest.raises(ValueError, match="simulator or inline"):
        parse_rehearsal("{}", "outline")


def test_an_error_of_protocol_is_known_from_a_refusal_of_the_domain():
    declared = ParseError("MALFORMED_JSON", "no").as_result()
    assert declared == {"error_tool_call": {"code": "MALFORMED_JSON", "message": "no"}}
    assert is_error_tool_call(declared)
    for refusal in ({"error": "order already shipped"}, ["error_tool_call"], "error_tool_call", None):
        assert not is_error_tool_call(refusal)


PIECES = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", "<execution_result>", "</execution_result>", "<|im_end|>"]
    + [
        "</tool_response>",
        "{",
        "}",
        "[",
        "]",
        '"',
        "\\",
        "\\ud800",
        ",",
        ":",
        "NaN",
        "1e999",
        "\n",
        "\ud800",
        "[" * 3000,
    ]
    + ['{"name": "f", "arguments": {}}', '{"name": "', '"arguments": ']
)
ANY_TEXT = st.lists(PIECES | st.text(st.characters(), max_size=8), max_size=24).map("".join)


@settings(max_examples=300, deadline=None)
@given(ANY_TEXT)
def test_no_text_raises_and_every_outcome_is_sound(text):
    turn = parse_tool_calls(text)
    assert not (turn.error and turn.calls)
    for made in turn.calls:
        assert made.name.strip() and isinstance(made.arguments, dict)
        json.dumps(made.arguments, allow_nan=False, ensure_ascii=False).encode()  # storable
    turn.content.encode() + turn.reasoning.encode()
    for form in ("simulator", "inline"):
        result = parse_rehearsal(text, form)
        assert result.value is None or result.error is None
        json.dumps(result.value, allow_nan=False, ensure_ascii=False).encode()


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(max_size=4), JSON_VALUES, max_size=3), st.booleans(), st.booleans())
def test_what_json_writes_is_read_back(arguments, ascii_only, as_string):
    written = json.dumps(arguments) if as_string else arguments
    body = json.dumps({"name": "f", "arguments": written}, ensure_ascii=ascii_only)
    assert parse_tool_calls(call(body)) == Turn(calls=(ToolCall("f", arguments),))
    assert parse_rehearsal(json.dumps(arguments, ensure_ascii=ascii_only), "inline").value == arguments
