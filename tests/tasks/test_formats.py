"""One set of tasks, every file it may come in: the same tasks in the same order, and nothing passed over in silence."""

import gzip
import json
import subprocess
import sys

import fsspec
import pytest

from envace_jax.tasks import TaskError, read_records, read_tasks
from envace_jax.tasks.synthetic import annotations, verl_row, write


@pytest.fixture(scope="module")
def records():
    return annotations(5)


@pytest.fixture(scope="module")
def directory(records, tmp_path_factory):
    """annotations.json, annotations.jsonl and verl.parquet."""
    path = tmp_path_factory.mktemp("tasks")
    write(path, records)
    return path


def put(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def lines(path):
    return [(record.line, record.value, record.reason) for record in read_records(path)]


def ids(path):
    return [task.id for task in read_tasks(str(path))]


def test_the_files_that_ship_hold_the_same_tasks_in_both_spellings(fixtures_dir):
    shipped = fixtures_dir / "tasks"
    whole = json.loads((shipped / "annotations.json").read_text())
    assert [json.loads(line) for line in (shipped / "annotations.jsonl").read_text().splitlines()] == whole
    assert [task.to_json() for task in read_tasks(str(shipped / "verl.parquet"))] == whole
    assert len(whole) == 8


def test_the_synthetic_records_have_the_keys_of_the_public_format_and_no_others(records):
    for record in records:
        assert record.keys() == {"uuid", "messages", "tools", "checklists"}
        items = [item for turn in record["checklists"][0] for item in turn]
        assert {tuple(item) for item in items} == {
            ("id", "question", "focus_on", "pass_condition", "failure_examples", "evidence")
            + ("required_for_next_turn", "dependence", "weight")
        }
        assert all(evidence.keys() == {"turn", "step", "from", "snippet"} for i in items for evidence in i["evidence"])
        assert all(m["content"].startswith("<think>") for m in record["messages"] if m["role"] == "assistant")


@pytest.mark.parametrize("name", ["annotations.json", "annotations.jsonl", "verl.parquet"])
def test_every_format_gives_the_same_tasks(records, directory, name):
    tasks = list(read_tasks(str(directory / name)))
    assert [task.to_json() for task in tasks] == records
    assert all(task.needs_judge for task in tasks)


def test_the_verl_spelling_may_come_as_json_lines(records, tmp_path):
    path = put(tmp_path / "rows.jsonl", "\n".join(json.dumps(verl_row(r, i)) for i, r in enumerate(records)))
    assert [task.to_json() for task in read_tasks(path)] == records


def test_a_json_file_may_be_one_object_or_lines(records, tmp_path):
    one = put(tmp_path / "one.json", json.dumps(records[0], indent=2))
    several = put(tmp_path / "several.json", "\n".join(json.dumps(r) for r in records))
    assert ids(one) == [records[0]["uuid"]]
    assert ids(several) == [r["uuid"] for r in records]


def test_annotations_in_parquet_may_keep_their_lists_as_text(records, tmp_path):
    import pyarrow
    from pyarrow import parquet

    columns = {name: [r[name] if name == "uuid" else json.dumps(r[name]) for r in records] for name in records[0]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    assert [task.to_json() for task in read_tasks(str(tmp_path / "t.parquet"))] == records


def test_paths_may_be_remote_compressed_or_a_pattern(records, directory, tmp_path):
    expected = [r["uuid"] for r in records]
    with fsspec.open("memory://there/tasks.jsonl", "wb") as file:
        file.write((directory / "annotations.jsonl").read_bytes())
    assert ids("memory://there/tasks.jsonl") == expected
    put(tmp_path / "tasks.jsonl.gz", gzip.compress((directory / "annotations.jsonl").read_bytes()))
    assert ids(tmp_path / "tasks.jsonl.gz") == expected
    for name in ("b", "a"):
        put(tmp_path / f"part-{name}.jsonl", json.dumps({**records[0], "uuid": name}))
    assert ids(tmp_path / "part-*.jsonl") == ["a", "b"]


@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["unix", "windows"])
def test_blank_lines_byte_order_marks_and_line_ends_do_not_matter(records, tmp_path, end):
    text = "\ufeff" + end.join(["", json.dumps(records[0]), "  ", json.dumps(records[1]), ""])
    assert ids(put(tmp_path / "t.jsonl", text)) == [records[0]["uuid"], records[1]["uuid"]]
    assert [line for line, *_ in lines(tmp_path / "t.jsonl")] == [2, 4]


def test_an_array_of_any_layout_gives_each_element_with_the_line_it_begins_on(tmp_path):
    path = put(tmp_path / "t.json", '\n [ {"a": "x,]}"},\n\n  {"b":\n [1,\n 2]} , {"c": {}}\n]\n ')
    assert lines(path) == [(2, {"a": "x,]}"}, None), (4, {"b": [1, 2]}, None), (6, {"c": {}}, None)]
    assert lines(put(tmp_path / "none.json", "[]")) == []
    assert lines(put(tmp_path / "empty.json", "")) == []


def test_elements_longer_than_a_chunk_are_put_together(tmp_path, monkeypatch):
    monkeypatch.setattr("envace_jax.tasks.files.CHUNK", 7)
    values = [{"number": i, "text": 'a "quoted" \\ ] }' * i} for i in range(12)]
    path = put(tmp_path / "t.json", json.dumps(values, indent=1))
    assert [value for _, value, _ in lines(path)] == values
    broken = put(tmp_path / "b.json", '[{"a": 1}, {"b" 2, "c": [3]}, {"d": 4}, 1234567890, {"e": 5}]')
    found = lines(broken)
    assert [value for _, value, _ in found] == [{"a": 1}, None, {"d": 4}, 1234567890, {"e": 5}]
    assert "not JSON" in found[1][2]


BAD = '{"a": NaN}'
DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not JSON"),
        (BAD, "NaN is not a JSON number"),
        (DEEP, "nested too deep"),
        ('{"a": 1} {"b": 2}', "not JSON"),
        ("1" * 5000, "not JSON"),
    ],
    ids=["broken", "nan", "deep", "two", "long number"],
)
def test_a_line_that_cannot_be_read_costs_that_line(records, tmp_path, text, reason):
    path = put(tmp_path / "t.jsonl", f"{json.dumps(records[0])}\n{text}\n{json.dumps(records[1])}\n")
    (_, first, _), (line, value, said), (_, last, _) = lines(path)
    assert (first, last) == (records[0], records[1])
    assert (line, value) == (2, None) and reason in said


def test_bytes_that_are_no_text_cost_their_line(records, tmp_path):
    good = json.dumps(records[0]).encode()
    path = put(tmp_path / "t.jsonl", good + b"\n\xff\xfe{}\n" + good)
    assert [value is None for _, value, _ in lines(path)] == [False, True, False]
    assert "not UTF-8" in lines(path)[1][2]


@pytest.mark.parametrize(
    ("text", "count", "last"),
    [
        ('[{"a": 1}, {"b": ', 2, "cannot be told"),
        ('[{"a": 1},', 2, "ends before its array"),
        ('[{"a": 1}', 2, "ends before its array"),
        ('[{"a": 1}] {"b": 2}', 2, "after the end"),
        ('[{"a": 1}, "unended', 2, "cannot be told"),
        (f'[{{"a": 1}}, {DEEP}', 2, "nested too deep"),
    ],
)
def test_an_array_that_breaks_off_says_so(tmp_path, text, count, last):
    found = lines(put(tmp_path / "t.json", text))
    assert len(found) == count and found[0][1] == {"a": 1} and last in found[-1][2]


def test_an_element_that_is_no_json_costs_itself(tmp_path):
    found = lines(put(tmp_path / "t.json", '[{"a": 1}, {"b" 2}, tru, {"c": "}]"}, {"d": NaN}, {"e": 1}]'))
    assert [value for _, value, _ in found] == [{"a": 1}, None, None, {"c": "}]"}, None, {"e": 1}]


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.9])
def test_half_a_compressed_file_is_read_as_far_as_it_goes(records, tmp_path, keep):
    whole = gzip.compress("\n".join(json.dumps(r) for r in records * 40).encode())
    path = put(tmp_path / "t.jsonl.gz", whole[: int(len(whole) * keep)])
    found = lines(path)
    assert "cannot be read from here on" in found[-1][2] or "not JSON" in found[-1][2]
    assert all(value is not None for _, value, _ in found[:-2])


def test_files_that_cannot_be_opened_are_named(directory, tmp_path):
    put(tmp_path / "t.parquet", b"PAR1 nothing")
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"prompt": ["x"]}), tmp_path / "other.parquet")
    for path, words in (
        (tmp_path / "absent.jsonl", "cannot be read"),
        (tmp_path / "absent-*.jsonl", "no file has such a name"),
        (tmp_path, "a directory without a TFDS data set"),
        (tmp_path / "t.parquet", "not a parquet file"),
        (tmp_path / "other.parquet", "neither a column extra_info .* nor checklists; its columns are prompt"),
        ("nosuch://bucket/t.jsonl", "cannot be read"),
    ):
        with pytest.raises(TaskError, match=words) as caught:
            list(read_records(str(path)))
        assert str(path) in str(caught.value)


def test_reading_brings_neither_jax_nor_tensorflow_nor_transformers(directory):
    program = (
        "import sys\nfrom envace_jax.tasks import read_tasks\nimport envace_jax.rewards, envace_jax.tasks.pipeline\n"
        f"assert len(list(read_tasks({str(directory / 'verl.parquet')!r}))) == 5\n"
        "sys.exit(bool({'jax', 'tensorflow', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


PEAK = "print(next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('VmHWM')) / 2**20)"


def peak_memory(program: str) -> float:
    """GB that a Python program of its own took at most. Not ru_maxrss: a child inherits its parent's."""
    ended = subprocess.run([sys.executable, "-c", f"{program}\n{PEAK}"], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return float(ended.stdout)


@pytest.mark.slow(reason="writes and reads 10,000 tasks of 25 kB")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("name", ["t.jsonl", "t.json", "t.parquet"])
def test_tasks_stream_in_less_memory_than_they_would_fill(tmp_path, records, name):
    path = tmp_path / name
    write_many(path, records, 10_000)
    peak = peak_memory(
        "from envace_jax.tasks.inspection import check\n"
        f"report = check({str(path)!r})\n"
        "assert report.accepted == 10_000, report.rejected[:3]"
    )
    assert peak < 0.4  # of which 0.1 are the imports; decoded at once they would fill a gigabyte


@pytest.mark.slow(reason="converts 20,000 tasks of 25 kB, half a gigabyte")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_tasks_are_converted_in_less_memory_than_they_would_fill(tmp_path, records):
    write_many(tmp_path / "t.jsonl", records, 20_000)
    peak = peak_memory(
        "from envace_jax.tasks.tfds_builder import build\n"
        f"made = build({{'train': {str(tmp_path / 't.jsonl')!r}}}, {str(tmp_path / 'out')!r})\n"
        "assert made == {'train': 20_000}"
    )
    assert peak < 0.45


def write_many(path, records, count):
    """`count` tasks of about the size of public ones, written piece by piece; parquet in one row group."""
    import pyarrow
    from pyarrow import parquet

    def made(i):
        record = dict(records[i % len(records)], uuid=f"t{i}")
        padding = f" {i}" * 400
        record["messages"] = [{**m, "content": m["content"] + padding} for m in record["messages"]]
        return record

    if path.suffix == ".parquet":
        schema = pyarrow.Table.from_pylist([verl_row(made(i), i) for i in range(len(records))]).schema
        with parquet.ParquetWriter(path, schema) as writer:
            for start in range(0, count, 20_000):
                rows = [verl_row(made(i), i) for i in range(start, min(start + 20_000, count))]
                writer.write_table(pyarrow.Table.from_pylist(rows, schema), row_group_size=count)
        return
    with open(path, "w", encoding="utf-8") as file:
        between = ",\n" if path.suffix == ".json" else "\n"
        file.write("[" if path.suffix == ".json" else "")
        for i in range(count):
            file.write((between if i else "") + json.dumps(made(i)))
        file.write("]" if path.suffix == ".json" else "\n")
