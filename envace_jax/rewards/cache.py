"""Verdicts on disk, by content: what was answered once is never asked again, by this run or one that goes on from it.

Append-only JSON lines. A line is written whole and at once, so that a killed process loses at most its last verdict; a
line that broke off is passed over when the file is read, and the next one begins on a line of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from envace_jax.errors import ConfigError


def content_key(request: Mapping[str, Any]) -> str:
    """The SHA-256 of a request as canonical JSON: whatever the verdict depends on, and nothing else."""
    text = json.dumps(request, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class VerdictCache:
    """Verdicts by key. `path` is where new ones go; None keeps them in memory alone.

    Files beside it that share its name up to a suffix (`verdicts-1.jsonl` beside `verdicts.jsonl`) are read as well:
    several processes of one run each write their own.

    Raises ConfigError for a path that cannot be read or written.
    """

    def __init__(self, path: str | Path | None = None):
        self._path = None if path is None else Path(path)
        self._verdicts: dict[str, bool] = {}
        self._lock = threading.Lock()
        self._file = None
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            stem = self._path.stem.partition("-")[0]
            for sibling in sorted(self._path.parent.glob(f"{stem}*{self._path.suffix}")):
                self._read(sibling)
            self._file = open(self._path, "ab+")
            if self._file.seek(0, os.SEEK_END):
                self._file.seek(-1, os.SEEK_END)
                if self._file.read(1) != b"\n":
                    self._file.write(b"\n")
                    self._file.flush()
        except OSError as error:
            raise ConfigError(
                f"reward.cache={path}: verdicts cannot be kept there ({error.strerror}); choose another path"
            ) from error

    def __len__(self) -> int:
        return len(self._verdicts)

    def get(self, key: str) -> bool | None:
        """The verdict of a key, or None."""
        return self._verdicts.get(key)

    def put(self, key: str, verdict: bool, **about: Any) -> None:
        """Keep a verdict. `about` is for readers of the file."""
        line = json.dumps({"key": key, "answer": verdict, **about}, ensure_ascii=True) + "\n"
        with self._lock:
            self._verdicts[key] = verdict
            if self._file is not None:
                self._file.write(line.encode())
                self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read(self, path: Path) -> None:
        with open(path, "rb") as file:
            for line in file:
                try:
                    entry = json.loads(line)
                except ValueError:
                    continue
                if (
                    isinstance(entry, dict)
                    and isinstance(entry.get("key"), str)
                    and isinstance(entry.get("answer"), bool)
                ):
                    self._verdicts[entry["key"]] = entry["answer"]
