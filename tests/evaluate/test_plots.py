"""Pictures of fidelity."""

import pytest

from envace_jax.errors import ConfigError
from envace_jax.evaluate.plots import LOOPS, SUBSETS, plot_fidelity
from envace_jax.evaluate.results import Measure, Result


def result():
    measures = {f"{loop}/exact_match{subset}": Measure(0.5, 0.4, 0.6, 10) for loop in LOOPS for subset in SUBSETS}
    measures |= {
        f"{loop}/exact_match/step_{n}": Measure(0.9 - 0.1 * n, None, None, 5) for loop in LOOPS for n in range(3)
    }
    return Result("fidelity", {"model": "some/model", "seed": 0}, measures, {"nearest": {"exact_match": 0.3}})


def test_a_picture_shows_both_loops_all_kinds_of_calls_and_the_floor(tmp_path):
    plot_fidelity(result(), tmp_path / "f.svg")
    drawn = (tmp_path / "f.svg").read_text()
    for words in (*LOOPS.values(), *SUBSETS.values(), "nearest, no model", "model some/model"):
        assert f"<!-- {words}" in drawn


def test_a_name_of_no_picture_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="png"):
        plot_fidelity(result(), tmp_path / "f.txt")
