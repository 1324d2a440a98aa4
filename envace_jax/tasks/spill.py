"""Texts put aside on disk, at random access: what is gone through once and wanted again is not kept in memory."""

from __future__ import annotations

import os
import tempfile
from array import array


class Spill:
    """Pieces of bytes in a nameless temporary file (`TMPDIR`), with an index of where each begins: 8 bytes a piece."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()
        self._starts = array("Q", [0])

    def append(self, piece: bytes) -> None:
        self._file.write(piece)
        self._starts.append(self._starts[-1] + len(piece))

    def flush(self) -> None:
        """Before pieces are read."""
        self._file.flush()

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> bytes:
        start, end = self._starts[index], self._starts[index + 1]
        return os.pread(self._file.fileno(), end - start, start)  # no shared position: threads may read at once

    def close(self) -> None:
        """The file is gone then; it is, too, when the process ends."""
        self._file.close()
