"""Converted once to TFDS, tasks are read at random from disk; without TensorFlow, and all of a file or nothing."""

import json
import subprocess
import sys

import pytest

from envace_jax import cli
from envace_jax.tasks import TaskError, read_tasks, tfds_builder
from envace_jax.tasks.synthetic import annotations, write
from envace_jax.tasks.tfds_builder import TfdsTasks, build, is_tfds


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    directory = tmp_path_factory.mktemp("source")
    write(directory, annotations(6))
    (directory / "test.jsonl").write_text("".join(json.dumps(r) + "\n" for r in annotations(2, split="test")))
    return directory


@pytest.fixture(scope="module")
def built(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("built") / "data"
    sources = {"train": str(source / "verl.parquet"), "test": str(source / "test.jsonl")}
    assert build(sources, out) == {"train": 6, "test": 2}
    return out


def test_the_tasks_come_back_in_order_and_at_random(source, built):
    expected = list(read_tasks(str(source / "annotations.json")))
    assert list(read_tasks(str(built))) == expected
    tasks = TfdsTasks(str(built), "train")
    assert len(tasks) == 6 and [tasks[i] for i in (5, 0, 3)] == [expected[i] for i in (5, 0, 3)]


def test_splits_are_apart(source, built):
    assert list(read_tasks(str(built), split="test")) == list(read_tasks(str(source / "test.jsonl")))
    with pytest.raises(TaskError, match="no split 'validation'; there are .*test"):
        TfdsTasks(str(built), "validation")


def test_the_files_are_array_record_and_of_the_public_format(source, built):
    import tensorflow_datasets as tfds

    (version,) = (built / "checklist_tasks").iterdir()
    assert {p.suffix for p in version.iterdir()} == {".json", ".array_record-00000-of-00001"}
    assert [p.name for p in built.iterdir()] == ["checklist_tasks"]
    (example,) = list(tfds.builder_from_directory(version).as_data_source("train[3:4]"))
    record = json.loads((source / "annotations.jsonl").read_text().splitlines()[3])
    assert example["id"].decode() == record["uuid"] and json.loads(example["task"]) == record


def test_a_large_split_lies_in_several_files_in_order(source, tmp_path, monkeypatch):
    monkeypatch.setattr(tfds_builder, "SHARD", 4)
    assert build({"train": str(source / "annotations.jsonl")}, tmp_path / "out") == {"train": 6}
    names = sorted(path.name for path in (tmp_path / "out").rglob("*array_record*"))
    assert [name.rpartition(".")[2] for name in names] == [f"array_record-0000{i}-of-00002" for i in (0, 1)]
    tasks, expected = TfdsTasks(str(tmp_path / "out")), list(read_tasks(str(source / "annotations.jsonl")))
    assert [tasks[i] for i in (5, 3, 4, 0)] == [expected[i] for i in (5, 3, 4, 0)]
    assert list(read_tasks(str(tmp_path / "out"))) == expected


def test_the_version_directory_is_the_data_set_too(built):
    (version,) = (built / "checklist_tasks").iterdir()
    assert is_tfds(str(version)) and len(TfdsTasks(str(version))) == 6
    assert not is_tfds(str(built.parent)) and not is_tfds("nosuch://bucket/data")


def test_a_second_conversion_to_the_same_place_is_refused(source, built):
    with pytest.raises(TaskError, match="holds a data set already"):
        build({"train": str(source / "test.jsonl")}, built)


def test_a_bad_record_stops_the_conversion_and_nothing_is_left(source, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text((source / "test.jsonl").read_text() + "{\n")
    with pytest.raises(TaskError, match=r"bad.jsonl, line 3: .*not JSON.*--skip-bad"):
        build({"train": str(bad)}, tmp_path / "out")
    assert not is_tfds(str(tmp_path / "out"))
    left_out = []
    assert build({"train": str(bad)}, tmp_path / "out", on_error=left_out.append) == {"train": 2}
    assert [error.line for error in left_out] == [3]


def test_a_source_without_a_task_is_named(tmp_path):
    (tmp_path / "none.jsonl").write_text("{\n")
    with pytest.raises(TaskError, match="none.jsonl: no task to convert for the split 'train'"):
        build({"train": str(tmp_path / "none.jsonl")}, tmp_path / "out", on_error=lambda error: None)


def test_a_source_that_is_not_there_is_named_before_anything_is_written(tmp_path):
    with pytest.raises(TaskError, match="absent.jsonl: cannot be read"):
        build({"train": str(tmp_path / "absent.jsonl")}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_verb_converts_and_tells_how_to_train_on_it(source, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["data", "build", source / "annotations.jsonl", out, "--split", f"test={source / 'test.jsonl'}"]
    with pytest.raises(SystemExit) as ended:
        cli.main(list(map(str, arguments)))
    printed = capsys.readouterr().out
    assert ended.value.code == 0
    assert "6 tasks in train, 2 tasks in test" in printed and f"tasks.path={out}" in printed
    with pytest.raises(SystemExit) as ended:
        cli.main(["data", "check", str(out), "--split", "test", "--json"])
    assert ended.value.code == 0 and json.loads(capsys.readouterr().out)["accepted"] == 2


def test_neither_converting_nor_reading_imports_tensorflow(source, tmp_path):
    program = (
        "import sys\nfrom envace_jax.tasks.tfds_builder import TfdsTasks, build\n"
        f"build({{'train': {str(source / 'test.jsonl')!r}}}, {str(tmp_path / 'out')!r})\n"
        f"assert len(TfdsTasks({str(tmp_path / 'out')!r})) == 2\n"
        "sys.exit(bool({'jax', 'tensorflow'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
