"""The table of docs/tpu.md is made from what was compiled, by a script."""

import pytest

from launch.table import BEGIN, END, insert, read, table


def found(model, topology, chips, fits, peak=12e9):
    return {
        "model": model,
        "topology": topology,
        "product": f"{topology} sold",
        "chips": chips,
        "mesh": {"data": 1, "fsdp": chips, "tp": 1},
        "fits": fits,
        "parameters_bytes": 1e9,
        "optimizer_bytes": 2e9,
        "peak_bytes": peak,
        "hbm_bytes": 95e9,
        "seconds_estimate": 30.4,
    }


def test_a_row_is_the_smallest_slice_that_fits():
    measured = [
        found("qwen3-8b", "v5p:2x2x1", 4, fits=False),
        found("qwen3-8b", "v5p:2x4x4", 32, fits=True),
        found("qwen3-8b", "v5p:2x2x2", 8, fits=True, peak=61.25e9),
    ]
    row = "| qwen3-8b | v5p:2x2x2 sold | v5p:2x2x2 | 1 x 8 x 1 | 1.0 GB | 2.0 GB | 61.2 GB | 95.0 GB | 30 s |"
    assert table(measured).splitlines()[2:] == [row]


def test_rows_are_ordered_by_the_size_of_the_model():
    measured = [found(f"qwen3-{size}", "v5e:4x4", 16, fits=True) for size in ("14b", "8b", "1.7b", "32b")]
    order = [line.split("|")[1].strip() for line in table(measured).splitlines()[2:]]
    assert order == ["qwen3-1.7b", "qwen3-8b", "qwen3-14b", "qwen3-32b"]


def test_what_does_not_fit_has_no_row():
    assert table([found("qwen3-8b", "v5e:2x2", 4, fits=False)]) == "No slice has been compiled yet."


def test_only_the_place_between_the_markers_changes():
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert insert(page, "new") == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    with pytest.raises(ValueError, match="lacks"):
        insert("no markers", "new")


def test_the_page_shows_what_was_compiled(root):
    page = (root / "docs" / "tpu.md").read_text()
    assert insert(page, table(read())) == page
