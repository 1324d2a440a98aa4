"""What needs no model."""

import json

import pytest

from envace_jax.errors import ConfigError
from envace_jax.evaluate.fidelity import print_floors
from envace_jax.evaluate.floors import RecordedCall, floors, read_calls


def call(entry, text, response, category="all"):
    return RecordedCall(category, entry, text.partition("(")[0], text, response)


def test_the_nearest_call_of_the_same_tool_in_another_entry_answers():
    calls = [
        call("1", "get(a=1, b=2)", "one"),
        call("1", "get(a=1, b=3)", "own entry, nearer"),
        call("2", "get(a=1, b=9)", "one"),
        call("2", "put(a=1, b=2)", "another tool"),
    ]
    found = floors(calls)
    # get → "one" for the first two (right, wrong); the third → the first of equals, "one" (right); put has none.
    assert found["nearest"]["exact_match"] == 50.0
    assert found["nearest"]["error_agreement"] == 75.0


def test_the_commonest_response_of_a_tool_is_a_floor_too():
    calls = [call(str(i), f"get(a={i})", "x" if i else "y") for i in range(4)]
    assert floors(calls)["commonest"]["exact_match"] == 75.0


@pytest.mark.parametrize(
    ("file", "category", "exact", "value"),
    [
        ("bfcl_triples.json", "multi_turn_base", 49.5, 59.4),
        ("tau2_triples.json", "retail", 64.7, 75.9),
        ("tau2_triples.json", "airline", 35.2, 47.4),
        ("tau2_triples.json", "telecom", 55.4, 55.4),
    ],
)
def test_published_floors(shared_dir, capsys, file, category, exact, value):
    print_floors(shared_dir / "data" / file, category=category, as_json=True)
    nearest = json.loads(capsys.readouterr().out)["nearest"]
    assert (nearest["exact_match"], nearest["value_f1"]) == pytest.approx((exact, value), abs=0.1)


def test_lines_of_calls_are_read_with_names_and_arguments(tmp_path):
    file = tmp_path / "calls.jsonl"
    record = {"tools": [], "history": [], "call": {"name": "get", "arguments": {"a": 1}}, "response": {"b": 2}}
    file.write_text(json.dumps(record) + "\n")
    (found,) = read_calls(file)
    assert (found.name, found.call, found.response) == ("get", 'get({"a": 1})', '{"b": 2}')


@pytest.mark.parametrize(
    ("text", "said"), [("", "no record"), ("{", "line 1"), ("[1]", "record 0"), ('{"call": "f()"}', "record 0")]
)
def test_a_file_that_holds_no_calls_is_named(tmp_path, text, said):
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"bad.json.*{said}"):
        read_calls(file)


def test_an_unknown_category_names_the_known_ones(tmp_path):
    file = tmp_path / "calls.json"
    file.write_text(json.dumps([{"cat": "easy", "id": "1", "call": "f()", "response": "x"}]))
    with pytest.raises(ConfigError, match="easy"):
        print_floors(file, category="hard")
