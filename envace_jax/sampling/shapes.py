"""Which programs an engine may compile: every bucket is decided here, and all of them can be listed."""

from collections.abc import Iterator
from dataclasses import dataclass

from .buckets import fit, ladder
from .pieces import Pieces


@dataclass(frozen=True)
class Shapes:
    """The shapes of an engine of `slots` rows of `max_length` tokens.

    windows: how much of the cache attention may look at, ascending, the last is all of it. pieces: the calls that
    append. coarse: a program costs more than padding does (a small model on a CPU): larger steps, fewer programs.
    compact: a few active rows are decoded as a small batch, copied out of the cache; halves: half of them may be.
    """

    slots: int
    max_length: int
    windows: tuple[int, ...]
    pieces: Pieces
    coarse: bool
    compact: bool
    halves: bool = True

    def decoding_windows(self, rows: int) -> tuple[int, ...]:
        """The windows of a decoding loop over `rows`; where shapes are coarse, a part of the slots has but one."""
        return (self.max_length,) if self.coarse and rows < self.slots else self.windows

    def decoding_rows(self) -> list[int]:
        """How many rows a decoding loop may work on: all, a half where halves are copied, a quarter and an eighth."""
        buckets, divisor = [self.slots], 2 if self.halves else 4
        while self.compact and divisor <= 8 and self.slots % divisor == 0:
            buckets.append(self.slots // divisor)
            divisor *= 2
        return buckets

    def decoding(self) -> Iterator[tuple[int, int]]:
        """(rows, window) of every decoding loop."""
        for rows in self.decoding_rows():
            yield from ((rows, window) for window in self.decoding_windows(rows))

    def appending_window(self, size: int, longest: int) -> int:
        """Of a call for pieces of `size` tokens that go on in streams, after which the longest has `longest`."""
        return fit(longest, self._appending_windows(size))

    def appending(self) -> Iterator[tuple[int, int, int]]:
        """(rows, tokens of each, window) of every call that appends."""
        for rows, size in self.pieces.shapes():
            windows = {self.fresh_window(size), *self._appending_windows(size)}
            yield from ((rows, size, window) for window in sorted(windows))

    def fresh_window(self, size: int) -> int:
        """Of a call for pieces of `size` tokens that all begin a stream, which see nothing but themselves."""
        return size if not self.coarse or size == self.pieces.sizes[-1] else self.max_length

    def forking_window(self, longest: int) -> int:
        """Of a call that copies streams of up to `longest` tokens."""
        return fit(longest, self._forking_windows)

    def forking_rows(self, copies: int) -> int:
        """How many copies the call makes that is to make `copies`."""
        return fit(copies, self._forking_rows)

    def forking(self) -> Iterator[tuple[int, int]]:
        """(copies, window) of every call that copies streams."""
        for rows in self._forking_rows:
            yield from ((rows, window) for window in self._forking_windows)

    @property
    def _forking_rows(self) -> tuple[int, ...]:
        return ladder(max(1, self.slots // 8), self.slots, halves=False, factor=4 if self.coarse else 2)

    @property
    def _forking_windows(self) -> tuple[int, ...]:
        return self._appending_windows(0)

    def _appending_windows(self, size: int) -> tuple[int, ...]:
        windows = (self.max_length,) if self.coarse else self.windows
        return tuple(window for window in windows if window >= size)
