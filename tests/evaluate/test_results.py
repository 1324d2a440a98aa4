"""One form for all evaluations."""

import io
import json

import pytest
from rich.console import Console

from envace_jax.errors import ConfigError
from envace_jax.evaluate.results import (
    Measure,
    Result,
    compare,
    from_figures,
    mean_measure,
    print_comparison,
    print_result,
    read_result,
    report,
    share_measure,
    write_result,
)


def result(hits, count, **settings):
    return Result("mini", {"seed": 0, **settings}, {"success": share_measure([True] * hits + [False] * (count - hits))})


def test_what_is_written_is_read_again(tmp_path):
    one = Result("mini", {"model": "m", "seed": 3}, {"nll": Measure(1.5)}, {"do_nothing": {"success": 0.1}})
    write_result(one, tmp_path / "runs" / "a.json")
    assert read_result(tmp_path / "runs" / "a.json") == one
    assert json.loads((tmp_path / "runs" / "a.json").read_text())["schema"] == 1


def test_a_measure_of_nothing_has_no_value_in_the_table():
    text = io.StringIO()
    print_result(Result("mini", {}, {"success": share_measure([])}), Console(file=text, width=80))
    assert "0.000" not in text.getvalue() and "success" in text.getvalue()


def test_a_difference_of_proportions_has_newcombes_interval():
    """The example of Newcombe (1998), method 10: 56/70 against 48/80, 0.2 within 0.0524 .. 0.3339."""
    (d,) = compare(result(48, 80), result(56, 70))
    assert (d.b - d.a, d.low, d.high) == pytest.approx((0.2, 0.0524, 0.3339), abs=5e-5)
    assert d.beyond_noise


def test_a_small_difference_is_noise():
    (d,) = compare(result(50, 100), result(55, 100))
    assert not d.beyond_noise


def test_a_comparison_says_which_settings_differ():
    text = io.StringIO()
    print_comparison(result(10, 100, model="base"), result(60, 100, model="trained"), Console(file=text, width=120))
    assert "model: base → trained" in text.getvalue() and "beyond noise" in text.getvalue()
    with pytest.raises(ConfigError, match="different evaluations"):
        print_comparison(result(1, 2), Result("fidelity", {}, {}))


def test_conversations_are_resampled_whole():
    """Ten equal calls of one conversation say no more than one: two conversations, one right, one wrong."""
    m = mean_measure([1.0] * 10 + [0.0] * 10, ["a"] * 10 + ["b"] * 10)
    assert (m.value, m.low, m.high, m.count) == (0.5, 0.0, 1.0, 20)
    alone = mean_measure([1.0] * 10 + [0.0] * 10, range(20))
    assert 0.2 < alone.low < 0.4 and 0.6 < alone.high < 0.8


def test_weights_count_tokens():
    assert mean_measure([1.0, 4.0], [0, 1], [3, 1]).value == pytest.approx(1.75)


def test_flat_figures_become_measures():
    flat = {"eval/success": 0.5, "eval/success_low": 0.2, "eval/success_high": 0.8, "eval/success_count": 8.0}
    found = from_figures(flat | {"eval/nll": 1.0})
    assert found == {"success": Measure(0.5, 0.2, 0.8, 8), "nll": Measure(1.0)}


def test_a_report_is_one_json_object_on_stdout_and_the_same_in_the_file(tmp_path, capsys):
    report(result(1, 2), as_json=True, out=tmp_path / "a.json")
    assert capsys.readouterr().out == (tmp_path / "a.json").read_text()


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 2}', '{"schema": 1, "measures": {"a": 1}}'])
def test_another_file_is_refused_by_name(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match="x.json"):
        read_result(tmp_path / "x.json")
