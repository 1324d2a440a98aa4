"""Responses compared: the figures by hand."""

import pytest

from envace_jax.evaluate.metrics import is_error, mean_scores, score_response


def scores(predicted, real):
    return score_response(predicted, real)


def test_spelling_is_no_difference():
    assert set(scores('{"a":1, "b": "X  y"}', '{"b": "X  y", "a": 1}').values()) == {1.0} != scores("{}", "[]")
    assert scores("Sim  UNLOCKED", "sim unlocked")["exact_match"] == 1.0


def test_true_is_not_one():
    found = scores('{"a": true}', '{"a": 1}')
    assert (found["exact_match"], found["schema_f1"], found["value_f1"]) == (0.0, 0.0, 0.0)


def test_lists_are_compared_as_multisets_of_what_they_hold():
    found = scores('{"a": [{"b": 1}, {"b": 2}, {"b": 2}]}', '{"a": [{"b": 2}, {"b": 1}]}')
    assert found["exact_match"] == 0.0
    assert found["value_f1"] == found["schema_f1"] == pytest.approx(2 * 2 / (3 + 2))


def test_a_wrong_value_of_the_right_kind_counts_for_the_schema_alone():
    found = scores('{"id": 7, "name": "Ann"}', '{"id": 8, "name": "ann"}')
    assert (found["schema_f1"], found["value_f1"], found["token_f1"]) == (1.0, 0.5, 0.75)


def test_empty_containers_hold_no_value():
    assert scores("[]", "{}")["value_f1"] == 1.0 and scores("[]", "{}")["exact_match"] == 0.0


def test_without_a_prediction_everything_is_zero():
    assert set(scores(None, "{}").values()) == {0.0}


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ('{"error": "no such order"}', True),
        ('{"error_tool_call": {"code": "X"}}', True),
        ("Error: user not found", True),
        ('{"result": "error rate 0"}', False),
        ("None", False),
    ],
)
def test_what_counts_as_an_error(response, expected):
    assert is_error(response) is expected
    assert scores('{"ok": 1}', response)["error_agreement"] == float(not expected)


def test_means_are_over_calls_in_percent():
    both = mean_scores([scores("1", "1"), scores("1", "2")])
    assert both["exact_match"] == 50.0 and mean_scores([]) == {}


def test_a_response_nested_beyond_reading_is_text():
    assert scores("[" * 100_000, "[]")["exact_match"] == 0.0
