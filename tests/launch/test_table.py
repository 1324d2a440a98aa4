"""The table of docs/tpu.md is made from what was compiled, by a script."""

import json

import pytest

from launch.table import BEGIN, END, bounds, content, insert, read, table


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
    row = "| qwen3-8b | v5p:2x2x2 sold | v5p:2x2x2 | 1 x 8 x 1 | 1.0 GB | 2.0 GB | 61.2 GB | 95.0 GB | 30 s | "
    assert table(measured).splitlines()[2:] == [row + "v5p:2x2x1 sold: 12.0 GB as compiled |"]


def bound(model, topology, chips, fits, floor=99e9):
    names = {"model": model, "topology": topology, "product": f"{topology} sold", "chips": chips}
    return {**names, "fits": fits, "floor_bytes": floor, "hbm_bytes": 95e9}


def test_a_slice_may_be_too_small_by_formula():
    bounds_ = [bound("qwen3-8b", "v5p:2x2x1", 4, fits=False), bound("qwen3-8b", "v5p:2x2x2", 8, fits=None, floor=60e9)]
    (row,) = table([*bounds_, found("qwen3-8b", "v5p:2x2x2", 8, fits=True)]).splitlines()[2:]
    assert row.startswith("| qwen3-8b | v5p:2x2x2 sold |") and row.endswith("| v5p:2x2x1 sold: 99.0 GB by formula |")
    (row,) = table(bounds_).splitlines()[2:]
    assert row.startswith("| qwen3-8b | not compiled; at least v5p:2x2x2 sold |")
    assert row.endswith("| 95.0 GB |  | v5p:2x2x1 sold: 99.0 GB by formula |")
    (row,) = table(bounds_[:1]).splitlines()[2:]
    assert row.startswith("| qwen3-8b | no v5p |")


def test_rows_are_ordered_by_the_size_of_the_model():
    measured = [found(f"qwen3-{size}", "v5e:4x4", 16, fits=True) for size in ("14b", "8b", "1.7b", "32b")]
    order = [line.split("|")[1].strip() for line in table(measured).splitlines()[2:]]
    assert order == ["qwen3-1.7b", "qwen3-8b", "qwen3-14b", "qwen3-32b"]


def test_what_was_compiled_again_counts_as_it_was_then(tmp_path):
    file = tmp_path / "measured.jsonl"
    assert read(file) == []
    before, other = found("qwen3-8b", "v5e:4x4", 16, fits=True), found("qwen3-8b", "v5e:4x8", 32, fits=True)
    again = {**before, "peak_bytes": 13e9}
    file.write_text("".join(json.dumps(each) + "\n" for each in (before, other, again)))
    assert sorted(read(file), key=lambda each: each["chips"]) == [again, other]


def test_where_none_was_found_to_fit_the_row_says_so():
    measured = [found("qwen3-8b", "v5e:4x4", 16, fits=False, peak=20e9), found("qwen3-8b", "v5e:2x2", 4, fits=False)]
    (row,) = table(measured).splitlines()[2:]
    assert row.startswith("| qwen3-8b | larger than v5e:4x4 sold |")
    assert row.endswith("| v5e:4x4 sold: 20.0 GB as compiled |")


def test_what_is_too_small_by_formula(root):
    found = bounds([root / "configs" / "tpu_32b.yaml"])
    # A host of four v5e holds a quarter of the parameters on each chip to sample from: 16.4 GB, however many hosts.
    assert all(each["fits"] is False for each in found if each["topology"].startswith("v5e"))
    assert [each["product"] for each in found if each["fits"] is None] == ["v5p-32", "v6e-64"]


def test_only_the_place_between_the_markers_changes():
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert insert(page, "new") == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    with pytest.raises(ValueError, match="lacks"):
        insert("no markers", "new")


def test_the_page_shows_what_was_compiled(root):
    page = (root / "docs" / "tpu.md").read_text()
    assert insert(page, content()) == page
