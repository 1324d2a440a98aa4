"""Task files of every kind, streamed: JSONL, JSON (an array or one object), parquet, TFDS; local or any fsspec path.

Only a record or a handful of rows is in memory at a time. What cannot be read is a record too, with the reason in
place of its value, so that nothing is passed over in silence:

    read_records(path)   every record of the file, by line, decoded or with the reason why not
    read_tasks(path)     the tasks they make

A line that breaks off costs that line; an element of a JSON array that cannot be read costs itself where its end can be
told from its brackets, else the rest of the file.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import IO, Any

import fsspec
import fsspec.core

from envace_jax.tasks.records import Task, TaskError, parse_task
from envace_jax.tasks.shapes import Fault, decode_json, refuse_constant

PARQUET_ROWS = 32  # decoded at a time
PARQUET_COLUMNS = ("extra_info", "uuid", "messages", "tools", "checklists", "meta")
CHUNK = 1 << 20  # characters of a JSON text read at a time
MAX_ELEMENT = 1 << 28  # characters; an element of an array that has not ended by then is broken


@dataclass(frozen=True)
class Record:
    """One record of a file. `line` is where it begins: a line, or a row of parquet and TFDS, counted from 1."""

    path: str
    line: int
    value: Any = None
    reason: str | None = None  # why there is no value

    @property
    def where(self) -> str:
        return f"{self.path}, line {self.line}"

    def task(self) -> Task:
        """The task of this record. Raises `TaskError` with all that is known."""
        if self.reason is not None:
            raise TaskError(f"{self.where}: {self.reason}", reason=self.reason, line=self.line)
        return parse_task(self.value, where=self.where, line=self.line)


def read_tasks(
    path: str, *, split: str = "train", on_error: Callable[[TaskError], None] | None = None
) -> Iterator[Task]:
    """Tasks of a file, a glob of files or a TFDS directory, in order.

    A record that cannot be used raises `TaskError`, or is handed to `on_error` and skipped. `split` is that of TFDS.
    """
    for record in read_records(path, split=split):
        try:
            task = record.task()
        except TaskError as error:
            if on_error is None:
                raise TaskError(
                    f"{error}; set tasks.skip_bad=true (`envace data build`: --skip-bad) to leave such records out",
                    reason=error.reason,
                    task_id=error.task_id,
                    line=error.line,
                ) from error
            on_error(error)
            continue
        yield task


def read_records(path: str, *, split: str = "train") -> Iterator[Record]:
    """All records, in order. Raises `TaskError` for a path that cannot be opened at all."""
    from envace_jax.tasks import tfds_builder

    path = str(path)
    if tfds_builder.is_tfds(path):
        yield from tfds_builder.read_records(path, split)
        return
    for name in expand(path):
        yield from _read_file(name)


def expand(path: str) -> list[str]:
    """The files that a path means: itself, or those that its wildcards match. Raises `TaskError` when there is none."""
    try:
        system, plain = fsspec.core.url_to_fs(path)
        if system.isdir(plain):
            raise TaskError(
                f"{path}: a directory without a TFDS data set (dataset_info.json, or one version directory that has "
                f"it); name its files, as in {path.rstrip('/')}/*.parquet"
            )
        if system.exists(plain) or not any(c in plain for c in "*?["):
            return [path]
        found = sorted(system.glob(plain))
    except TaskError:
        raise
    except (OSError, ImportError, ValueError) as error:
        raise TaskError(f"{path}: cannot be read ({error}); check the path") from error
    if not found:
        raise TaskError(f"{path}: no file has such a name; check the path")
    return [system.unstrip_protocol(name) if "://" in path else name for name in found]


@contextmanager
def opened(path: str) -> Iterator[IO[bytes]]:
    """A file to read, decompressed by its name. Raises `TaskError` when it cannot be opened."""
    try:
        file = fsspec.open(path, "rb", compression="infer").open()
    except (OSError, ImportError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TaskError(f"{path}: cannot be read ({reason}); check the path") from error
    with file:
        yield file


def _read_file(path: str) -> Iterator[Record]:
    with opened(path) as file:
        line = 0
        try:
            for record in _records(path, file):
                line = record.line
                yield record
        except TaskError:
            raise
        except (OSError, EOFError, ValueError) as error:  # a connection, a compressed stream or a page that breaks off
            yield Record(path, line + 1, reason=f"the file cannot be read from here on ({error})")


def _records(path: str, file: IO[bytes]) -> Iterator[Record]:
    head = file.read(1 << 16)
    file.seek(0)
    suffixes = PurePosixPath(path).suffixes
    if head.startswith(b"PAR1") or suffixes[-1:] in ([".parquet"], [".pq"]):
        return _read_parquet(path, file)
    if ".jsonl" in suffixes or ".ndjson" in suffixes or _looks_like_lines(head):
        return _read_lines(path, file)
    return _read_json(path, io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline=""))


def _looks_like_lines(head: bytes) -> bool:
    """Whether a file without a telling name is JSON lines: its first line is a whole object, and another follows."""
    first, newline, rest = head.removeprefix(b"\xef\xbb\xbf").lstrip().partition(b"\n")
    if not (first.startswith(b"{") and newline and rest.strip()):
        return False
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        return first.rstrip().endswith(b"}") and rest.lstrip().startswith(b"{")
    return True


def _read_lines(path: str, file: IO[bytes]) -> Iterator[Record]:
    for number, line in enumerate(file, start=1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line.strip():
            continue
        try:
            yield Record(path, number, decode_json(line.decode("utf-8"), "the line"))
        except UnicodeDecodeError as error:
            yield Record(path, number, reason=f"the line is not UTF-8 ({error.reason} at byte {error.start})")
        except Fault as fault:
            yield Record(path, number, reason=str(fault))


def _read_parquet(path: str, file: IO[bytes]) -> Iterator[Record]:
    import pyarrow
    from pyarrow import parquet

    try:
        # Pages are read as they are needed: a row group, which may be the whole file, is never held at once.
        table = parquet.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False)
        names = [name for name in PARQUET_COLUMNS if name in table.schema_arrow.names]
    except (pyarrow.ArrowException, ValueError, OSError) as error:
        raise TaskError(f"{path}: not a parquet file ({error})") from error
    if "extra_info" not in names and "checklists" not in names:
        raise TaskError(
            f"{path}: neither a column extra_info (verl) nor checklists; its columns are "
            f"{', '.join(table.schema_arrow.names[:12])}"
        )
    if "extra_info" in names and "checklists" not in names:
        names = ["extra_info"]  # the other columns repeat it
    row = 0
    try:
        for batch in table.iter_batches(batch_size=PARQUET_ROWS, columns=names):
            for value in batch.to_pylist():
                row += 1
                yield Record(path, row, _without_nulls(value))
    except pyarrow.ArrowException as error:  # not all of them are ValueErrors
        raise ValueError(str(error)) from error


def _without_nulls(value: Any) -> Any:
    """Parquet fills the keys that other rows have with null; JSON leaves them out."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


_SPACES = re.compile(r"\s*")
_BETWEEN = re.compile(r"[\s,]*")
_STRUCTURE = re.compile(r'"(?:[^"\\]|\\.)*"|["\[\]{}]', re.DOTALL)
_BARE_END = re.compile(r"[,\]\n]")
_DECODER = json.JSONDecoder(parse_constant=refuse_constant)


def _read_json(path: str, file: io.TextIOWrapper) -> Iterator[Record]:
    """The elements of an array, or single values one after the other, decoded piece by piece."""
    text, position, ended, line = "", 0, False, 1

    def more() -> None:
        nonlocal text, position, ended
        left = text[position:]
        piece = file.read(max(CHUNK, len(left)))  # doubling, so that a long element is not scanned over and over
        text, position, ended = left + piece, 0, not piece

    def skip(pattern: re.Pattern[str]) -> None:
        nonlocal position, line
        while True:
            end = pattern.match(text, position).end()
            line += text.count("\n", position, end)
            position = end
            if position < len(text) or ended:
                return
            more()

    skip(_SPACES)
    array = text.startswith("[", position)
    position += array
    while True:
        skip(_BETWEEN)
        if position == len(text):
            if array:
                yield Record(path, line, reason="the file ends before its array does")
            return
        if array and text[position] == "]":
            position += 1
            skip(_SPACES)
            if position < len(text):
                yield Record(path, line, reason="text after the end of the array")
            return
        value, end, reason = _next_value(text, position, ended)
        if end is None and not ended and len(text) - position < MAX_ELEMENT:
            more()
            continue
        if end is None:
            yield Record(path, line, reason=f"{reason}; where it ends cannot be told, so the rest is not read")
            return
        yield Record(path, line, value, reason)
        line += text.count("\n", position, end)
        position = end


def _next_value(text: str, start: int, ended: bool) -> tuple[Any, int | None, str | None]:
    """(value, its end, None), or (None, its end, reason); an end of None: more text is needed to tell."""
    try:
        value, end = _DECODER.raw_decode(text, start)
        if end < len(text) or ended or text[end - 1] in '}]"':  # else: a number that may go on
            return value, end, None
        return None, None, None
    except RecursionError:
        reason = "the record is nested too deep"
    except ValueError as error:
        place = f" at its character {error.pos - start}" if isinstance(error, json.JSONDecodeError) else ""
        reason = f"the record is not JSON ({getattr(error, 'msg', error)}{place})"
    return None, _broken_end(text, start, ended), reason


def _broken_end(text: str, start: int, ended: bool) -> int | None:
    """Where a value that cannot be decoded ends: where its bracket is closed, strings aside."""
    if text[start] not in '"[{':
        bare = _BARE_END.search(text, start + 1)
        return bare.start() if bare else len(text) if ended else None
    depth = 0
    for match in _STRUCTURE.finditer(text, start):
        mark = match.group()
        if mark == '"':  # a string that does not end
            return None
        depth += (mark in "[{") - (mark in "]}")
        if depth <= 0:
            return match.end()
    return None
